"""draft: the whole draft phase in one call, against a plain read of the head's weights.

    python benchmarks/bench_draft.py [--trees 4:3:2 8:4:4 8:4:5 32:6:8 5:4:1] [--context 256] [--rounds 30]
                                     [--json FILE]

A random EAGLE-3 head of the size of a 135M model's, bf16, one request, three rows to extend by (two accepted
tokens and the new one). A tree is nodes:levels:top_k, the root among its nodes; 5:4:1 is a chain of 4.
Floor: the packed weights of the layer and the LM head once a level, the fusion matrix once, and the committed
keys and values once a level, at the rate of a plain read of the same weights. Where the
caches hold them, the read finds them there too, and a draft phase that finds them nearer may be faster than
that read.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, paired_ratio, parser, start, write_json

import eagle_cuda
from eagle_cuda._extension import _C
from eagle_cuda.attention import rope_table
from eagle_cuda.draft import DraftHead, DraftLayer, draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import PackedWeight, pack_weight
from eagle_cuda.tree import DraftTree, empty_draft_tree
from eagle_cuda.verify import Accepted

BF16 = torch.bfloat16
H, INNER, HEADS, KV_HEADS, D, V, VD, AUX = 576, 1536, 9, 3, 64, 49152, 8192, 3
EPS = 1e-5
ACCEPTED = 2


class Shape(NamedTuple):
    nodes: int
    levels: int
    top_k: int

    @property
    def name(self) -> str:
        return f"chain {self.levels}" if self.top_k == 1 else ":".join(map(str, self))


class Weights(NamedTuple):
    per_level: list[PackedWeight]
    fc: PackedWeight
    lm_head: torch.Tensor  # as it was before packing
    norm: torch.Tensor
    draft_to_target: torch.Tensor


def make_head(max_positions: int) -> tuple[DraftHead, Weights]:
    def matrix(n: int, k: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(n, k) * scale * k**-0.5).to(BF16)

    def gain() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(H)).to(BF16)

    layer = DraftLayer(
        qkv=pack_weight(matrix((HEADS + 2 * KV_HEADS) * D, 2 * H)),
        o=pack_weight(matrix(H, HEADS * D)),
        gate_up=pack_weight(matrix(2 * INNER, H), paired=True),
        down=pack_weight(matrix(H, INNER)),
        post_norm=gain(),
        input_norm=gain(),
        hidden_norm=gain(),
    )
    lm_head, fc = matrix(VD, H, 3.0), pack_weight(matrix(H, AUX * H))
    packed, norm = pack_weight(lm_head), gain()
    draft_to_target = torch.randperm(V)[:VD].sort().values.int()
    head = DraftHead(
        kind="eagle3", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D, norm_eps=EPS,
        embedding=torch.randn(V, H).to(BF16), fc=fc, lm_head=packed, layers=[layer], norm=norm,
        draft_to_target=draft_to_target, **rope_table(max_positions, D)._asdict(),
    )  # fmt: skip
    per_level = [layer.qkv, layer.o, layer.gate_up, layer.down, packed]
    return head, Weights(per_level, fc, lm_head, norm, draft_to_target)


class Cycle:
    """One request between two cycles: calling it repeats the same draft phase."""

    def __init__(self, context: int, rows: int):
        self.head, self.weights = make_head(context + rows)
        self.cache = KVCache.empty(1, context + rows, KV_HEADS, D, dtype=BF16)
        for part in (self.cache.k, self.cache.v):
            part.copy_(torch.randn(part.shape))
        self.seq_lens = torch.tensor([context], dtype=torch.int32)
        self.features = torch.randn(1, ACCEPTED + 1, AUX * H).to(BF16)
        self.tokens = torch.randint(0, V, (1, ACCEPTED + 1), dtype=torch.int32)
        self.accepted = Accepted(
            path=torch.arange(ACCEPTED + 1, dtype=torch.int32)[None],
            num_accepted=torch.tensor([ACCEPTED], dtype=torch.int32),
            next_tokens=self.tokens[:, -1],
            finished=torch.zeros(1, dtype=torch.int32),
            new_seq_lens=self.seq_lens + ACCEPTED + 1,
        )
        self.coupling = {"temperature": torch.ones(1), "seeds": torch.tensor([7])}

    def draft(self, shape: Shape, coupled: bool, out: DraftTree) -> DraftTree:
        return draft(
            self.head, self.features, self.tokens, self.accepted, self.seq_lens, [self.cache],
            top_k=shape.top_k, levels=shape.levels, out=out, **(self.coupling if coupled else {}),
        )  # fmt: skip

    def first_level(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(target ids, log-probabilities) of the root's best children: norm and LM head by torch."""
        hidden = torch.empty(ACCEPTED + 1, H, dtype=BF16)
        extend_draft(
            self.head, self.features[0], self.tokens[0], [0, ACCEPTED + 1], self.seq_lens, [self.cache],
            hidden=hidden,
        )  # fmt: skip
        x = hidden[-1].float()
        x = x * torch.rsqrt((x * x).mean() + EPS) * self.weights.norm.float()
        best = torch.log_softmax(self.weights.lm_head.float() @ x.to(BF16).float(), dim=0).topk(count)
        return self.weights.draft_to_target[best.indices], best.values


def check(cycle: Cycle, shape: Shape, coupled: bool) -> None:
    """The tree is full and well-formed, and the root's best child is torch's."""
    tree = cycle.draft(shape, coupled, empty_draft_tree(1, shape.nodes))
    n, depths, parents = int(tree.num_nodes[0]), tree.depths[0].tolist(), tree.parents[0].tolist()
    sound = n == shape.nodes and int(tree.tokens[0, 0]) == int(cycle.tokens[0, -1])
    sound = sound and parents[0] == -1 and max(depths) <= shape.levels
    for i in range(1, n):
        sound = sound and 0 <= parents[i] < i and depths[i] == depths[parents[i]] + 1
    if not coupled:
        ids, log_probs = cycle.first_level(shape.top_k)
        known = dict(zip(ids.tolist(), log_probs.tolist()))
        children = [i for i in range(1, n) if parents[i] == 0]
        # Rounding differs, so that equally good candidates may change places: the scores must agree.
        best = max(tree.scores[0, children].tolist(), default=float("nan"))
        sound = sound and abs(best - float(log_probs[0])) < 0.05
        for i in children:
            want = known.get(int(tree.tokens[0, i]))
            sound = sound and (abs(float(tree.scores[0, i]) - want) < 0.05 if want is not None else True)
    if not sound:
        raise SystemExit(f"draft {shape.name}: the tree is not what it should be: {tree}")


def measure(cycle: Cycle, shapes: list[Shape], rounds: int) -> dict[str, Samples]:
    """Arms "read" (a piece per matrix, the fusion matrix last) and "plain NAME", "coupled NAME"."""
    arms: dict[str, object] = {
        "read": [lambda p=p: _C.read_probe(p.data) for p in [*cycle.weights.per_level, cycle.weights.fc]]
    }
    for shape in shapes:
        for kind in ("plain", "coupled"):
            check(cycle, shape, kind == "coupled")
            out = empty_draft_tree(1, shape.nodes)
            arms[f"{kind} {shape.name}"] = lambda s=shape, c=kind == "coupled", o=out: cycle.draft(s, c, o)
    return interleave(arms, rounds=rounds)  # type: ignore[arg-type]


def report(
    cycle: Cycle, shapes: list[Shape], context: int, samples: dict[str, Samples], console: Console
) -> list[dict]:
    level = sum(p.data.numel() for p in cycle.weights.per_level)
    fc = cycle.weights.fc.data.numel()
    committed = 2 * context * KV_HEADS * D * BF16.itemsize
    rate = (level + fc) / samples["read"].minimum
    table = Table(
        title=f"draft, bf16, {level / 1e6:.1f} MB of head a level, {fc / 1e6:.1f} MB of fusion, {context} "
        f"rows; read {rate / 1e9:.1f} GB/s; {eagle_cuda.num_threads()} threads"
    )
    for column in ("tree", "kind", "MB", "floor ms", "ms", "median ms", "of floor", "x plain, paired"):
        table.add_column(column, justify="right")
    results = []
    for shape in shapes:
        size = shape.levels * (level + committed) + fc
        for kind in ("plain", "coupled"):
            arm, plain = samples[f"{kind} {shape.name}"], samples[f"plain {shape.name}"]
            row = {
                "tree": shape.name,
                **shape._asdict(),
                "coupled": kind == "coupled",
                "bytes": size,
                "bytes_per_level": level,
                "floor_milliseconds": size / rate * 1e3,
                "milliseconds": arm.minimum * 1e3,
                "median_milliseconds": arm.median * 1e3,
                "share_of_floor": size / rate / arm.minimum,
                "paired_against_plain": paired_ratio(arm, plain),
            }
            results.append(row)
            table.add_row(
                shape.name,
                kind,
                f"{size / 1e6:.1f}",
                f"{row['floor_milliseconds']:.2f}",
                f"{row['milliseconds']:.2f}",
                f"{row['median_milliseconds']:.2f}",
                f"{row['share_of_floor']:.0%}",
                f"{row['paired_against_plain']:.2f}",
            )
    console.print(table)
    return results


def parse_tree(text: str) -> Shape:
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"expected nodes:levels:top_k, got {text!r}")
    return Shape(*map(int, parts))


def main() -> None:
    default = [Shape(4, 3, 2), Shape(8, 4, 4), Shape(8, 4, 5), Shape(32, 6, 8), Shape(5, 4, 1)]
    line = parser(__doc__, rounds=30)
    line.add_argument("--trees", type=parse_tree, nargs="+", default=default, metavar="NODES:LEVELS:TOP_K")
    line.add_argument("--context", type=int, default=256, help="committed rows in the head's cache")
    options, console = line.parse_args(), start()
    with torch.inference_mode():
        spare = ACCEPTED + 1 + max((s.levels - 1) * s.top_k for s in options.trees)
        cycle = Cycle(options.context, spare)
        samples = measure(cycle, options.trees, options.rounds)
        results = report(cycle, options.trees, options.context, samples, console)
    if options.json:
        write_json(options.json, {"draft": results})


if __name__ == "__main__":
    main()
