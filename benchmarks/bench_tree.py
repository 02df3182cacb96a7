"""tree, verify, kv_cache: the small ops of a cycle, expand_tree, build_tree, verify and compact_kv.

    python benchmarks/bench_tree.py [--nodes 60] [--top-k 10] [--levels 6] [--layers 30] [--batches 1 4]
                                    [--rounds 300] [--json FILE]

There is little to read or to compute here. The yardstick is the same call with a batch of 0: wrapper, tensor
exchange and checks, which most of the time goes to. compact_kv moves the accepted nodes' rows of
a 135M model's caches (3 KV heads of 64, bf16).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, parser, start, write_json

import eagle_cuda
from eagle_cuda.kv_cache import KVCache, compact_kv
from eagle_cuda.tree import Beam, Candidates, DraftTree, build_tree, empty_candidates, expand_tree
from eagle_cuda.verify import Accepted, verify

KV_HEADS, HEAD_DIM, CONTEXT = 3, 64, 256
Call = Callable[[], object]


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"{what}: the result differs from the reference")


def children(batch: int, rows: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of every row's best children, best first."""
    logits = 2 * torch.randn(batch, rows, 4096)
    best = torch.log_softmax(logits, -1).topk(top_k)
    return best.indices.int(), best.values


def grow(batch: int, top_k: int, levels: int) -> tuple[Candidates, Beam, Call]:
    """A fully grown tree, and a call that repeats its second level."""
    candidates, beam = empty_candidates(batch, top_k, levels)
    start, again = None, None
    for level in range(1, levels + 1):
        tokens, log_probs = children(batch, 1 if level == 1 else top_k, top_k)
        before = beam.scores.clone()
        if level == 2:
            start, again = Beam(*(t.clone() for t in beam)), (tokens, log_probs)
        expand_tree(tokens, log_probs, candidates, beam, level=level, levels=levels)
        sums = log_probs.flatten(1) if level == 1 else (before[:, :, None] + log_probs).flatten(1)
        expect(torch.equal(beam.scores, sums.topk(top_k).values), f"expand_tree, level {level}")
    if start is None or again is None:  # a single level: repeat that one
        scratch, scratch_beam = empty_candidates(batch, top_k, levels)
        tokens, log_probs = children(batch, 1, top_k)
        return (
            candidates,
            beam,
            lambda: expand_tree(tokens, log_probs, scratch, scratch_beam, level=1, levels=levels),
        )
    # The second level replaces the beam that it reads. A repetition therefore starts from its own result:
    # other numbers, the same work.
    scratch = Candidates(*(t.clone() for t in candidates))
    return candidates, beam, lambda: expand_tree(*again, scratch, start, level=2, levels=levels)


def build(batch: int, nodes: int, candidates: Candidates) -> tuple[DraftTree, Call]:
    roots = torch.full((batch,), 5, dtype=torch.int32)
    out = build_tree(roots, candidates, max_nodes=nodes)
    count = min(nodes - 1, candidates.scores.shape[1])
    want = candidates.scores.topk(count).values
    expect(bool((out.num_nodes == count + 1).all()), "build_tree, number of nodes")
    if batch:
        expect(
            torch.equal(out.scores[:, 1 : count + 1].sort(descending=True).values, want), "build_tree, scores"
        )
    return out, lambda: build_tree(roots, candidates, out=out)


def accept(batch: int, tree: DraftTree) -> tuple[Accepted, Call]:
    """The target agrees with the first child of every node: the walk goes down to a leaf."""
    first = tree.first_child.long()
    targets = torch.where(first >= 0, tree.tokens.gather(1, first.clamp(min=0)), torch.tensor(-1)).int()
    seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32)
    out = verify(tree, targets, seq_lens)
    for b in range(batch):
        walk = [0]
        while int(first[b, walk[-1]]) >= 0:
            walk.append(int(first[b, walk[-1]]))
        expect(out.path[b, : len(walk)].tolist() == walk, "verify, path")
        expect(int(out.num_accepted[b]) == len(walk) - 1, "verify, number accepted")
    return out, lambda: verify(tree, targets, seq_lens, out=out)


def compact(batch: int, nodes: int, layers: int, moved: int) -> Call:
    """`moved` accepted nodes, none of which is in place."""
    caches = [
        KVCache.empty(batch, CONTEXT + nodes, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(layers)
    ]
    for cache in caches:
        for part in (cache.k, cache.v):
            part.copy_(torch.randn(part.shape))
    step = max(1, (nodes - 1) // max(moved, 1))
    moved = min(moved, nodes - 1)
    slots = [0] + [1 + i * step + (step > 1) for i in range(moved)]
    path = torch.tensor([slots] * batch, dtype=torch.int32).reshape(batch, len(slots))
    accepted = torch.full((batch,), moved, dtype=torch.int32)
    seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32)
    want = [cache.k[:, [CONTEXT + s for s in slots]] for cache in caches]
    compact_kv(caches, path, accepted, seq_lens, max_nodes=nodes)
    for cache, rows in zip(caches, want):
        expect(torch.equal(cache.k[:, CONTEXT : CONTEXT + len(slots)], rows), "compact_kv, keys")
    return lambda: compact_kv(caches, path, accepted, seq_lens, max_nodes=nodes)


def calls(batch: int, options: argparse.Namespace) -> dict[str, Call]:
    candidates, _, expand = grow(batch, options.top_k, options.levels)
    tree, rerank = build(batch, options.nodes, candidates)
    _, walk = accept(batch, tree)
    move = compact(batch, options.nodes, options.layers, options.accepted)
    return {"expand_tree": expand, "build_tree": rerank, "verify": walk, "compact_kv": move}


def measure(options: argparse.Namespace) -> dict[str, Samples]:
    """Arms "OP, B" for every batch size, and for none as "OP, 0"."""
    arms = {
        f"{name}, {batch}": call
        for batch in [0, *options.batches]
        for name, call in calls(batch, options).items()
    }
    return interleave(arms, rounds=options.rounds, warmup=5)


def report(options: argparse.Namespace, samples: dict[str, Samples], console: Console) -> list[dict]:
    moved = min(options.accepted, options.nodes - 1)
    size = 2 * moved * options.layers * 2 * KV_HEADS * HEAD_DIM * 2  # read and written, keys and values
    table = Table(
        title=f"{options.nodes} nodes out of K {options.top_k}, {options.levels} levels; compact_kv: "
        f"{options.layers} layers, {moved} rows, {size / 1e3:.0f} kB; {eagle_cuda.num_threads()} threads"
    )
    for column in ("op", "B", "us", "median us", "batch of 0, us"):
        table.add_column(column, justify="right")
    results = []
    for name in ("expand_tree", "build_tree", "verify", "compact_kv"):
        empty = samples[f"{name}, 0"]
        for batch in options.batches:
            arm = samples[f"{name}, {batch}"]
            row = {
                "op": name,
                "batch": batch,
                "microseconds": arm.minimum * 1e6,
                "median_microseconds": arm.median * 1e6,
                "empty_call_microseconds": empty.minimum * 1e6,
            }
            results.append(row)
            table.add_row(
                name,
                str(batch),
                f"{row['microseconds']:.1f}",
                f"{row['median_microseconds']:.1f}",
                f"{row['empty_call_microseconds']:.1f}",
            )
    console.print(table)
    return results


def main() -> None:
    line = parser(__doc__, rounds=300)
    line.add_argument("--nodes", type=int, default=60, metavar="N")
    line.add_argument("--top-k", type=int, default=10, metavar="K")
    line.add_argument("--levels", type=int, default=6)
    line.add_argument("--layers", type=int, default=30, help="caches that compact_kv moves rows in")
    line.add_argument("--accepted", type=int, default=4, help="rows that compact_kv moves")
    line.add_argument("--batches", type=int, nargs="+", default=[1, 4], metavar="B")
    options, console = line.parse_args(), start()
    with torch.inference_mode():
        samples = measure(options)
        results = report(options, samples, console)
    if options.json:
        write_json(options.json, {"settings": _settings(options), "tree": results})


def _settings(options: argparse.Namespace) -> dict[str, object]:
    return {key: value for key, value in vars(options).items() if key != "json"}


if __name__ == "__main__":
    main()
