"""Naive trees in plain Python, written from EAGLE-2 (section 4) and the comments of tree.h."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

NEGATIVE_INFINITY = float("-inf")


def clamp(log_prob: float) -> float:
    return NEGATIVE_INFINITY if math.isnan(log_prob) else min(log_prob, 0.0)


@dataclass
class Growth:
    """Candidates of one request as (token, score, parent) by flat index, and every level's beam."""

    top_k: int
    tokens: list[int] = field(default_factory=list)
    scores: list[np.float32] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    beams: list[list[int]] = field(default_factory=list)  # flat indices, best first
    paths: list[tuple[int, ...]] | None = None  # of a static tree

    def expand(self, tokens, log_probs) -> None:
        """tokens, log_probs [R][K]: row r belongs to the r-th entry of the latest beam (to the root at level
        1)."""
        if self.paths is not None:
            self.expand_static(tokens, log_probs)
            return
        first = len(self.tokens)
        for row in range(len(tokens)):
            parent = self.beams[-1][row] if self.beams else -1
            base = self.scores[parent] if self.beams else np.float32(0)
            for token, log_prob in zip(tokens[row], log_probs[row], strict=True):
                self.tokens.append(int(token))
                self.scores.append(np.float32(base) + np.float32(clamp(float(log_prob))))
                self.parents.append(parent)
        level = range(first, len(self.tokens))
        self.beams.append(sorted(level, key=lambda i: (-self.scores[i], i))[: self.top_k])

    def with_children(self, level: int) -> list[tuple[int, ...]]:
        """A static tree's nodes of a level that have children: its beam, whatever they score."""
        inner = {path[:-1] for path in self.paths}
        return sorted(path for path in self.paths if len(path) == level and path in inner)

    def expand_static(self, tokens, log_probs) -> None:
        """Candidates outside the tree score -inf; a beam entry without a node is -1."""
        level, first = len(self.beams) + 1, len(self.tokens)
        rows = [()] if level == 1 else self.with_children(level - 1)
        at = {}  # path -> flat index
        for row in range(len(tokens)):
            parent = self.beams[-1][row] if self.beams else -1
            for rank, (token, log_prob) in enumerate(zip(tokens[row], log_probs[row], strict=True)):
                path = (*rows[row], rank) if row < len(rows) else None
                base = self.scores[parent] if parent >= 0 else np.float32(0)
                score = np.float32(base) + np.float32(clamp(float(log_prob)))
                at[path] = len(self.tokens)
                self.tokens.append(int(token))
                self.scores.append(score if path in self.paths else np.float32(NEGATIVE_INFINITY))
                self.parents.append(parent)
        beam = [at[path] for path in self.with_children(level)]
        assert all(i >= first for i in beam)
        self.beams.append(beam + [-1] * (self.top_k - len(beam)))

    def ancestors(self, candidate: int) -> list[int]:
        """The candidate and all its ancestors, deepest first."""
        chain = []
        while candidate != -1:
            chain.append(candidate)
            candidate = self.parents[candidate]
        return chain


def build(root, tokens, scores, parents, *, max_nodes, limit=None, order="path"):
    """One request's tree as a dict of lists of length `max_nodes`, masks as integers, and `selected`."""
    limit = max_nodes if limit is None else max(0, min(limit, max_nodes))
    tree = {
        "tokens": [0] * max_nodes,
        "parents": [-2] * max_nodes,
        "depths": [0] * max_nodes,
        "mask": [0] * max_nodes,
        "scores": [0.0] * max_nodes,
        "first_child": [-1] * max_nodes,
        "next_sibling": [-1] * max_nodes,
        "selected": [-1] * max_nodes,
        "num_nodes": 0,
    }
    if limit == 0:
        return tree

    def chain(i):
        """The candidate's scores up to the root; None if a parent is invalid on the way."""
        values = []
        while i != -1:
            if not (-1 <= parents[i] < i):
                return None
            values.append(float(scores[i]))
            i = parents[i]
        return values

    worth = {}
    for i in range(len(tokens)):
        values = chain(i)
        if values is None or any(math.isnan(v) for v in values) or min(values) == NEGATIVE_INFINITY:
            continue
        worth[i] = min(values)
    chosen = sorted(sorted(worth, key=lambda i: (-worth[i], i))[: limit - 1])
    assert all(parents[i] == -1 or parents[i] in chosen for i in chosen)

    numbered = []
    if order == "path":
        at = -1
        while True:
            children = [i for i in chosen if parents[i] == at]
            if not children:
                break
            at = max(children, key=lambda i: (worth[i], -i))
            numbered.append(at)
    numbered += [i for i in chosen if i not in numbered]
    slot = {-1: 0} | {candidate: node for node, candidate in enumerate(numbered, 1)}

    tree["num_nodes"] = len(slot)
    tree["tokens"][0], tree["parents"][0], tree["mask"][0] = int(root), -1, 1
    for candidate in chosen:
        node, parent = slot[candidate], slot[parents[candidate]]
        tree["tokens"][node] = int(tokens[candidate])
        tree["scores"][node] = worth[candidate]
        tree["parents"][node] = parent
        tree["selected"][node] = candidate
        up = candidate
        while up != -1:
            tree["mask"][node] |= 1 << slot[up]
            tree["depths"][node] += 1
            up = parents[up]
        tree["mask"][node] |= 1
    for candidate, node in slot.items():
        children = [slot[c] for c in chosen if parents[c] == candidate]
        if children:
            tree["first_child"][node] = children[0]
        for left, right in itertools.pairwise(children):
            tree["next_sibling"][left] = right
    return tree


def retrieve_indices(parents, num_nodes) -> list[list[int]]:
    """One row per leaf that hangs from the root, in node order, unpadded."""

    def path(i):
        if i == 0:
            return [0]
        above = path(parents[i]) if 0 <= parents[i] < i else None
        return None if above is None else [*above, i]

    paths = {i: path(i) for i in range(num_nodes)}
    inner = {parents[i] for i, p in paths.items() if i > 0 and p is not None}
    return [p for i, p in paths.items() if p is not None and i not in inner]
