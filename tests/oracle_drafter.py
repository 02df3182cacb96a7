"""A drafter that knows what plain decoding emits, and hides it among decoys.

In every tree the continuation is planted down to a depth that runs through all of 0 .. levels, in slots that
are drawn at random (or in the first ones, as the best path of a real tree), as any of its parent's children.
Below the planted depth and beside it stand decoys. So every accepted length occurs, with rows to move and
without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from eagle_cuda.tree import DraftTree, tree_from_parents
from eagle_decode.engine import Engine
from eagle_decode.sequence import Batch
from scripted_target import ScriptedTarget
from tiny_models import ByteTokenizer


class OracleDrafter:
    """Implements eagle_decode.drafting.Drafter.

    continuations: request index -> all tokens that it emits. branching: children per node; 1 makes a chain.
    corrupt: called on every tree before it is handed out, with (arrays by name, row, planted slots from the
        root), for tests that break something.
    """

    def __init__(
        self,
        continuations: Mapping[int, Sequence[int]],
        *,
        levels: int,
        max_nodes: int,
        vocab_size: int,
        branching: int = 4,
        seed: int = 0,
        ragged: bool = True,
        corrupt: Callable[[dict[str, np.ndarray], int, list[int]], None] | None = None,
    ):
        self.levels, self.max_nodes = levels, max_nodes
        self._continuations, self._vocab_size, self._branching = continuations, vocab_size, branching
        self._random = random.Random(seed)
        self._ragged, self._corrupt = ragged, corrupt
        self._depths: dict[int, list[int]] = {}  # per request: planted depths to come

    def propose(self, batch: Batch) -> DraftTree:
        size = len(batch.requests)
        truths = [self._continuations[request.index][len(request.tokens) :] for request in batch.requests]
        depths = [
            min(self._next_depth(request.index), len(truth))
            for request, truth in zip(batch.requests, truths, strict=True)
        ]
        fewest = max(1, self.max_nodes // 2) if self._ragged else self.max_nodes
        nodes = [max(depth + 1, self._random.randint(fewest, self.max_nodes)) for depth in depths]
        width = max(nodes)
        arrays = {
            "tokens": np.zeros((size, width), np.int32),
            "parents": np.full((size, width), -2, np.int32),
            "depths": np.zeros((size, width), np.int32),
            "mask": np.zeros((size, width, (width + 31) // 32), np.int32),
            "scores": np.zeros((size, width), np.float32),
            "num_nodes": np.zeros(size, np.int32),
            "first_child": np.full((size, width), -1, np.int32),
            "next_sibling": np.full((size, width), -1, np.int32),
        }
        for row, request in enumerate(batch.requests):
            planted = self._plant(arrays, row, request.tokens[-1], truths[row], depths[row], nodes[row])
            if self._corrupt:
                self._corrupt(arrays, row, planted)
        return DraftTree(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def _next_depth(self, index: int) -> int:
        left = self._depths.setdefault(index, [])
        if not left:
            left.extend(self._random.sample(range(self.levels + 1), self.levels + 1))
        return left.pop()

    def _plant(
        self, arrays: dict[str, np.ndarray], row: int, root: int, truth: Sequence[int], depth: int, nodes: int
    ) -> list[int]:
        """Writes one tree; returns the slots of the planted path."""
        tokens, parents, depths = [root], [-1], [0]
        for d in range(depth):
            tokens.append(truth[d])
            parents.append(d)
            depths.append(d + 1)
        children: dict[int, set[int]] = {d: {truth[d]} for d in range(depth)}
        # The planted path must end where it is meant to: its last node gets no child that the target would
        #     choose.
        forbidden = {depth: truth[depth]} if depth < len(truth) else {}
        open_nodes = [
            i
            for i in range(len(tokens))
            if depths[i] < self.levels and len(children.get(i, ())) < self._branching
        ]
        while len(tokens) < nodes and open_nodes:
            parent = self._random.choice(open_nodes)
            taken = children.setdefault(parent, set())
            # A decoy likes to be a token of the true continuation, out of place.
            decoy = self._random.choice(truth) if truth and self._random.random() < 0.3 else -1
            while decoy in taken or decoy < 0 or decoy == forbidden.get(parent):
                decoy = self._random.randrange(self._vocab_size)
            taken.add(decoy)
            tokens.append(decoy)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            if depths[-1] < self.levels:
                open_nodes.append(len(tokens) - 1)
            if len(taken) >= self._branching:
                open_nodes.remove(parent)
        order = self._order(parents, depth)
        slot = {node: place for place, node in enumerate(order)}
        for place, node in enumerate(order):
            parent = slot[parents[node]] if node else -1
            arrays["tokens"][row, place] = tokens[node]
            arrays["parents"][row, place] = parent
            arrays["depths"][row, place] = depths[node]
            words = arrays["mask"][row, place].view(np.uint32)
            words[place // 32] |= np.uint32(1 << place % 32)
            if parent >= 0:
                words |= arrays["mask"][row, parent].view(np.uint32)
        arrays["num_nodes"][row] = len(order)
        link(arrays, row)
        return [slot[node] for node in range(depth + 1)]

    def _order(self, parents: list[int], depth: int) -> list[int]:
        """Nodes in the order of their slots: parents first, otherwise at random; the planted path first, one
        time in three."""
        order = list(range(depth + 1)) if self._random.random() < 1 / 3 else [0]
        placed = set(order)
        ready = [i for i, parent in enumerate(parents) if parent in placed and i not in placed]
        while ready:
            node = ready.pop(self._random.randrange(len(ready)))
            order.append(node)
            placed.add(node)
            ready += [i for i, parent in enumerate(parents) if parent == node]
        return order


def link(arrays: dict[str, np.ndarray], row: int) -> None:
    """Writes first_child and next_sibling of a row from its parents: siblings in ascending slots."""
    arrays["first_child"][row] = -1
    arrays["next_sibling"][row] = -1
    last: dict[int, int] = {}
    for node in range(1, int(arrays["num_nodes"][row])):
        parent = int(arrays["parents"][row, node])
        if parent in last:
            arrays["next_sibling"][row, last[parent]] = node
        else:
            arrays["first_child"][row, parent] = node
        last[parent] = node


class StaticDrafter:
    """The same tree for every request in every cycle. The continuation is planted on the paths to the nodes
    in turn; everything else is a decoy. Implements eagle_decode.drafting.Drafter.

    parents: of the nodes, parents[0] = -1, each before its children.
    """

    def __init__(
        self,
        continuations: Mapping[int, Sequence[int]],
        *,
        parents: Sequence[int],
        vocab_size: int,
        seed: int = 0,
    ):
        self._parents = list(parents)
        self._paths = [[0]]
        for i, parent in enumerate(self._parents[1:], start=1):
            self._paths.append([*self._paths[parent], i])
        self.levels = max(len(path) for path in self._paths) - 1
        self.max_nodes = len(self._parents)
        self._continuations, self._vocab_size = continuations, vocab_size
        self._random = random.Random(seed)
        self._turns: dict[int, list[int]] = {}  # per request: nodes to plant down to
        self._trees: dict[int, DraftTree] = {}  # per size of the batch: all but the tokens

    def propose(self, batch: Batch) -> DraftTree:
        tokens = [self._tokens(request.index, request.tokens) for request in batch.requests]
        size = len(tokens)
        if size not in self._trees:
            self._trees[size] = tree_from_parents(tokens, [self._parents] * size)
        return self._trees[size]._replace(tokens=torch.tensor(tokens, dtype=torch.int32))

    def _tokens(self, index: int, emitted: Sequence[int]) -> list[int]:
        truth = self._continuations[index][len(emitted) :]
        turns = self._turns.setdefault(index, [])
        if not turns:
            turns.extend(self._random.sample(range(self.max_nodes), self.max_nodes))
        path = self._paths[turns.pop()][: len(truth) + 1]
        tokens = [emitted[-1]]
        for i, parent in enumerate(self._parents[1:], start=1):
            depth = len(self._paths[i]) - 1
            right = truth[depth - 1] if depth <= len(truth) else -1
            taken = {tokens[j] for j in range(1, i) if self._parents[j] == parent} | {right}
            decoys = [token for token in range(self._vocab_size) if token not in taken]
            tokens.append(right if i in path else self._random.choice(decoys))
        return tokens


class ChainOfTruth(OracleDrafter):
    """A chain of as many tokens of the continuation as it may hold."""

    def __init__(self, continuation: Sequence[int], *, levels: int):
        super().__init__({0: continuation}, levels=levels, max_nodes=levels + 1, vocab_size=256, branching=1)

    def _next_depth(self, index: int) -> int:
        return self.levels


def scripted_engine(
    scripts: Mapping[int, Sequence[int]],
    *,
    levels: int = 5,
    max_nodes: int = 12,
    seed: int = 0,
    **options: Any,
) -> Engine:
    """An engine over scripts (first token of a prompt -> all that follows), whose drafter knows them."""
    drafter = OracleDrafter(
        dict(enumerate(scripts.values())), levels=levels, max_nodes=max_nodes, vocab_size=256, seed=seed
    )
    return Engine(ScriptedTarget(scripts), draft=drafter, tokenizer=ByteTokenizer(), **options)
