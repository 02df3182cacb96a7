"""Tokens per cycle against the coupling, by temperature and by what truncates the target's distribution.

    python benchmarks/coupling.py --prompts question.jsonl --json FILE

The target writes plainly, many requests at a time. At every N-th pass the head drafts a tree for each request
and each coupling, and none is verified: the text that the target goes on to write says how many of a tree's
tokens it would have accepted. All couplings are compared at the same places of the same texts, without a pass
of the target for any of them. Figures do not depend on the machine's speed or load.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from coupled_drafting import load, numbers, share
from end_to_end import Tree, parse_trees
from timing import start, write_json

from eagle_cuda.draft import draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.tree import DraftTree, empty_draft_tree
from eagle_decode import Engine, SamplingParams
from eagle_decode.demo import HEAD, TARGET
from eagle_decode.drafting import RootDrafter, move_rows, rows_of
from eagle_decode.heads.loaded import LoadedHead
from eagle_decode.models.base import Target
from eagle_decode.sequence import Batch
from eagle_decode.terminal import table

TRUNCATIONS: dict[str, dict[str, Any]] = {
    "none": {}, "top-p 0.9": {"top_p": 0.9}, "min-p 0.05": {"min_p": 0.05}, "top-k 20": {"top_k": 20},
}  # fmt: skip


class Drafted(NamedTuple):
    """A tree that was drafted for request `request` after `at` of its tokens."""

    tree: Tree
    coupling: float
    request: int
    at: int
    tokens: list[int]
    parents: list[int]

    def tokens_of_cycle(self, text: list[int]) -> int:
        """That a cycle with this tree yields where the target writes `text`."""
        rest, node = text[self.at :], 0
        for count, token in enumerate(rest):
            children = [n for n, parent in enumerate(self.parents) if parent == node and n > 0]
            node = next((n for n in children if self.tokens[n] == token), -1)
            if node < 0:
                return count + 1
        return len(rest)


class Onlooker:
    """A drafter that proposes roots only, and keeps what it would have proposed besides."""

    levels = 0
    max_nodes = 1

    def __init__(
        self, head: LoadedHead, target: Target, trees: list[Tree], couplings: list[float], every: int,
        *, capacity: int, max_length: int,
    ):  # fmt: skip
        self.feature_layers = head.feature_layers
        self.drafted: list[Drafted] = []
        self._trees, self._couplings, self._every, self._passes = trees, couplings, every, 0
        self._longest = max(tree.levels for tree in trees)
        room = max(tree.levels * tree.top_k for tree in trees) + 1
        self._head = head.to_draft_head(target.dtype, max_positions=max_length + self._longest + 1)
        shape = (len(head.layers), 2, capacity, max_length + room, head.num_kv_heads, self._head.head_dim)
        memory = torch.empty(shape, dtype=target.dtype, device=target.device)
        self._caches = [KVCache(layer[0], layer[1]) for layer in memory]
        self._no_rows = torch.zeros(1, dtype=torch.int32, device=target.device)
        self._plain = RootDrafter(capacity, target.device)

    def admit(self, row: int, tokens: torch.Tensor, features: torch.Tensor) -> None:
        caches = rows_of(self._caches, slice(row, row + 1))
        if len(tokens):
            extend_draft(self._head, features, tokens, [0, len(tokens)], self._no_rows, caches)

    def move(self, source: int, row: int, length: int) -> None:
        move_rows(self._caches, source, row, length)

    def propose(self, batch: Batch) -> DraftTree:
        self._passes += 1
        if self._passes % self._every:
            self._draft(batch, Tree(2, 1, 1), 0.0)  # keeps the head's cache up to date
        else:
            for tree in self._trees:
                for coupling in self._couplings:
                    made = self._draft(batch, tree, coupling)
                    columns = (made.tokens.tolist(), made.parents.tolist(), made.num_nodes.tolist())
                    for request, tokens, parents, nodes in zip(batch.requests, *columns, strict=True):
                        if request.remaining > self._longest + 2:
                            key = (tree, coupling, request.index, len(request.tokens))
                            self.drafted.append(Drafted(*key, tokens[:nodes], parents[:nodes]))
        return self._plain.propose(batch)

    def _draft(self, batch: Batch, tree: Tree, coupling: float) -> DraftTree:
        size = len(batch.requests)
        return draft(
            self._head, batch.features, batch.sampled.tokens, batch.accepted, batch.seq_lens,
            rows_of(self._caches, slice(0, size)), top_k=tree.top_k, levels=tree.levels,
            temperature=coupling * batch.temperature, seeds=batch.seeds,
            out=empty_draft_tree(size, tree.nodes, like=self._no_rows),
        )  # fmt: skip


def summarise(
    drafted: list[Drafted], texts: list[list[int]], groups: list[tuple[str, float]]
) -> list[dict[str, Any]]:
    """A row for each tree, temperature and truncation, and one for all truncations: tokens per cycle of every
    coupling. groups: of each request its truncation and temperature."""
    cells: dict[tuple[str, float, str], dict[float, list[int]]] = {}
    for one in drafted:
        truncation, temperature = groups[one.request]
        tokens = one.tokens_of_cycle(texts[one.request])
        for name in (truncation, *(["truncated"] if truncation != "none" else [])):
            cell = cells.setdefault((one.tree.name, temperature, name), {})
            cell.setdefault(one.coupling, []).append(tokens)
    return [
        {
            "tree": tree, "temperature": temperature, "truncation": name,
            "cycles": len(next(iter(cell.values()))),
            "tokens_per_cycle": {str(c): sum(counts) / len(counts) for c, counts in cell.items()},
        }
        for (tree, temperature, name), cell in sorted(cells.items())
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TARGET, help="Hugging Face folder, .gguf file, or packaged name")
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of the draft head")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns`, as MT-bench's question.jsonl")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=56)
    parser.add_argument("--temperatures", type=numbers(float), default=[0.7, 1.0], help="comma-separated")
    parser.add_argument("--seeds", type=numbers(int), default=[0], help="comma-separated")
    parser.add_argument(
        "--couplings", type=numbers(share), default=[0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
        help="comma-separated",
    )  # fmt: skip
    parser.add_argument("--trees", type=parse_trees, default=[Tree(32, 6, 8), Tree(8, 4, 4)])
    parser.add_argument("--every", type=int, default=8, help="passes of the target between two drafts")
    parser.add_argument("--batch", type=int, default=40, help="requests at a time; moves where drafts fall")
    parser.add_argument("--json", type=Path, help="write every figure there")
    chosen = parser.parse_args()

    console = start()
    with console.status("loading"):
        target, head, prompts, ends = load(chosen)
    room = max(map(len, prompts)) + chosen.max_new_tokens + 9
    onlooker = Onlooker(
        head, target, chosen.trees, chosen.couplings, chosen.every, capacity=chosen.batch, max_length=room
    )
    engine = Engine(target, draft=onlooker, max_batch=chosen.batch, max_length=room)
    settings = [
        (prompt, name, SamplingParams(
            temperature=temperature, seed=seed, max_new_tokens=chosen.max_new_tokens, stop_token_ids=ends,
            **TRUNCATIONS[name],
        ))
        for prompt in prompts
        for name in TRUNCATIONS
        for temperature in chosen.temperatures
        for seed in chosen.seeds
    ]  # fmt: skip
    results = engine.generate([prompt for prompt, _, _ in settings], [params for *_, params in settings])
    for result in results:
        if result.error is not None:
            raise RuntimeError(result.error)
    if not onlooker.drafted:
        raise SystemExit(f"--max-new-tokens: expected more, no draft fits into {chosen.max_new_tokens}")
    groups = [(name, params.temperature) for _, name, params in settings]
    rows = summarise(onlooker.drafted, [result.tokens for result in results], groups)
    columns = ("tree, T, truncation", "cycles", *(f"{coupling:g}" for coupling in chosen.couplings))
    cells = [
        [
            f"{row['tree']}, {row['temperature']:g}, {row['truncation']}", str(row["cycles"]),
            *(f"{value:.3f}" for value in row["tokens_per_cycle"].values()),
        ]
        for row in rows
    ]  # fmt: skip
    console.print(table("Tokens per cycle by coupling", columns, cells))
    if chosen.json:
        write_json(chosen.json, {"seeds": chosen.seeds, "every": chosen.every, "rows": rows})


if __name__ == "__main__":
    main()
