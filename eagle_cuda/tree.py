"""tree: growing a draft tree by levels, choosing the nodes worth verifying, and other forms of trees.

Candidates are numbered flat, as in EAGLE-2: level 1 holds candidates ``0 .. K-1``, level j >= 2 the ``K^2``
candidates from ``K + (j-2) K^2`` on, row by row of the beam. Equal scores: the smaller flat index wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from eagle_cuda._allocate import empty, integer, shape_of
from eagle_cuda._extension import _C

MAX_TREE_NODES: int = _C.MAX_TREE_NODES
MAX_TOP_K: int = _C.MAX_TOP_K
MAX_CANDIDATES: int = _C.MAX_CANDIDATES
MAX_BRANCHING_LEVELS: int = _C.MAX_BRANCHING_LEVELS


def _list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


class TreeShape(_C.TreeShape):
    """A static draft tree: which child, by rank, of which node, whatever the scores. `draft` and
    `expand_tree` take it, `MC_SIM_7B_63` is the published one. Immutable; equal where the nodes and `top_k`
    are.

    Attributes: paths (sorted by length, then lexicographically), num_nodes (the root not counted), levels,
    top_k (K: children computed per node, rows of a level).

    Source: EAGLE-1 (Li et al., arXiv 2401.15077), appendix A.
    """

    paths: tuple[tuple[int, ...], ...]

    def __init__(self, paths: Iterable[Sequence[int]], *, top_k: int | None = None):
        """
        Args:
            paths: For each node but the root the ranks on its way from the root, 0 the most likely child:
                ``(1,)`` is the root's second child, ``(1, 0)`` that node's best. 1 to 255 of them in any
                order, ranks 0 to 31; every node's parent must be among them.
            top_k: At least 1 more than the largest rank, and the most nodes with children that a level has;
                by default no more than that. At most 31 levels where it is above 1; at most 8192 candidates
                ``top_k + (levels - 1) * top_k**2``.

        Raises:
            ValueError: naming the argument.
        """
        if "paths" in self.__dict__:
            raise AttributeError("a TreeShape is immutable; make another one")
        if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
            raise ValueError(f"paths: expected a sequence of paths of ranks, got {paths!r:.80}")
        listed = [_list(path) for path in paths]
        for path in listed:
            if isinstance(path, (str, bytes)) or not isinstance(path, Sequence):
                raise ValueError(f"paths: expected sequences of ranks, got {path!r:.80}")
        ranks = [[integer("paths: ranks", rank, 0, MAX_TOP_K - 1) for rank in path] for path in listed]
        super().__init__(ranks, 0 if top_k is None else integer("top_k", top_k, 1, MAX_TOP_K))
        self.__dict__["paths"] = tuple(sorted(map(tuple, ranks), key=lambda path: (len(path), path)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a TreeShape is immutable; make another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a TreeShape is immutable; make another one")

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """The best child of the best child, `length` nodes in a row, 1 to 255."""
        length = integer("length", length, 1, MAX_TREE_NODES - 1)
        return cls([(0,) * n for n in range(1, length + 1)])

    def nodes_within(self, levels: int) -> int:
        """Nodes on the first `levels` levels, the root not counted."""
        return sum(len(path) <= levels for path in self.paths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeShape):
            return NotImplemented
        return (self.paths, self.top_k) == (other.paths, other.top_k)

    def __hash__(self) -> int:
        return hash((self.paths, self.top_k))

    def __repr__(self) -> str:
        return f"TreeShape({list(map(list, self.paths))}, top_k={self.top_k})"

    def __reduce__(self) -> Any:
        return _tree_shape, (self.paths, self.top_k)


def _tree_shape(paths: Iterable[Sequence[int]], top_k: int) -> TreeShape:
    return TreeShape(paths, top_k=top_k)


# The tree of EAGLE-1's published code for 7B models, under its name there: 25 nodes beside the root.
MC_SIM_7B_63 = TreeShape(
    [
        *((0,), (1,), (2,), (3,)),
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
        *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
        *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
    ]
)


class DraftTree(NamedTuple):
    """A draft tree per request. Node 0 is the root; ``parents[i] < i``. All int32 except the scores.

    Slots at and beyond `num_nodes`: token 0, parent -2, depth 0, mask 0, score 0, links -1; ops ignore them.
    """

    tokens: Any  # [B, N]
    parents: Any  # [B, N] root -1
    depths: Any  # [B, N]
    mask: Any  # [B, N, ceil(N/32)] ancestor-or-self bits
    scores: Any  # [B, N] float32, cumulative log-probability, root 0
    num_nodes: Any  # [B] root included; 0: the request is absent
    first_child: Any  # [B, N] -1 none; siblings in rank order
    next_sibling: Any  # [B, N] -1 none


class Candidates(NamedTuple):
    """All candidates of a tree of K wide levels: ``C = K + (levels - 1) K^2``."""

    tokens: Any  # [B, C] int32
    scores: Any  # [B, C] float32, cumulative log-probability
    parents: Any  # [B, C] int32, flat index of the parent candidate, -1 for the root


class Beam(NamedTuple):
    """The K best candidates of the latest level: the rows that grow the next one."""

    candidates: Any  # [B, K] int32, flat indices
    scores: Any  # [B, K] float32
    tokens: Any  # [B, K] int32
    rows: Any  # [B, K] int32, row of the parent in the previous beam, 0 at level 1
    mask: Any  # [B, K, ceil(levels K/32)] int32, ancestor-or-self bits; row r of level j is bit (j-1) K + r


class RetrieveIndices(NamedTuple):
    """EAGLE's retrieve_indices: one row per leaf in ascending node order, root to leaf, padded -1."""

    indices: Any  # [B, max_leaves, max_path] int32
    num_leaves: Any  # [B] int32


def empty_draft_tree(batch: int, max_nodes: int, *, like: Any = None) -> DraftTree:
    """A DraftTree of absent requests, to be filled by `build_tree` or `draft`: in the framework and on the
    device
    of `like`, or torch on the CPU."""
    batch, max_nodes = integer("batch", batch, 0), integer("max_nodes", max_nodes, 1, MAX_TREE_NODES)
    tree = _allocate(torch.empty(0) if like is None else like, batch, max_nodes)
    for array, value in zip(tree, _ABSENT):
        array[...] = value
    return tree


_ABSENT = DraftTree(
    tokens=0, parents=-2, depths=0, mask=0, scores=0, num_nodes=0, first_child=-1, next_sibling=-1
)


def _allocate(like: Any, batch: int, max_nodes: int) -> DraftTree:
    shape = (batch, max_nodes)
    return DraftTree(
        tokens=empty(like, shape, torch.int32),
        parents=empty(like, shape, torch.int32),
        depths=empty(like, shape, torch.int32),
        mask=empty(like, (*shape, (max_nodes + 31) // 32), torch.int32),
        scores=empty(like, shape, torch.float32),
        num_nodes=empty(like, (batch,), torch.int32),
        first_child=empty(like, shape, torch.int32),
        next_sibling=empty(like, shape, torch.int32),
    )


def tree_from_parents(tokens: Any, parents: Any, num_nodes: Any = None, *, device: Any = None) -> DraftTree:
    """A DraftTree of given shape, built on the host: depths, mask and links from the parents. Scores are 0.

    Args:
        tokens, parents: ``[B, N]`` tensors or nested lists; ``parents[b][0]`` is -1, behind it
            ``0 <= parents[b][i] < i``. Siblings are ranked in node order. Rows of lists may differ in length.
        num_nodes: ``[B]`` nodes in use, 0 for an absent request; default: the length of each row.

    Raises:
        ValueError: a parent that does not stand before its child, or rows that do not fit together.
    """
    token_rows, parent_rows = _rows("tokens", tokens), _rows("parents", parents)
    counts = [len(row) for row in token_rows] if num_nodes is None else [int(n) for n in _list(num_nodes)]
    if not len(token_rows) == len(parent_rows) == len(counts):
        raise ValueError(
            f"parents: expected {len(token_rows)} rows, got {len(parent_rows)} (num_nodes: {len(counts)})"
        )
    width = max([len(row) for row in token_rows] + counts + [1])
    tree = empty_draft_tree(len(counts), width)
    for b, n in enumerate(counts):
        if n < 0 or n > min(len(token_rows[b]), len(parent_rows[b])):
            raise ValueError(
                f"num_nodes[{b}]: expected 0 to {min(len(token_rows[b]), len(parent_rows[b]))}, got {n}"
            )
        masks, last_child = [0] * n, [-1] * n
        for i in range(n):
            parent = int(parent_rows[b][i])
            if parent != -1 if i == 0 else not 0 <= parent < i:
                raise ValueError(
                    f"parents[{b}][{i}]: expected {'-1' if i == 0 else f'0 to {i - 1}'}, got {parent}"
                )
            tree.tokens[b, i] = integer(f"tokens[{b}][{i}]", token_rows[b][i], -(2**31), 2**31 - 1)
            tree.parents[b, i] = parent
            masks[i] = 1 << i
            if i > 0:
                masks[i] |= masks[parent]
                tree.depths[b, i] = tree.depths[b, parent] + 1
                if last_child[parent] < 0:
                    tree.first_child[b, parent] = i
                else:
                    tree.next_sibling[b, last_child[parent]] = i
                last_child[parent] = i
            for w in range(tree.mask.shape[2]):
                word = masks[i] >> (32 * w) & 0xFFFFFFFF
                tree.mask[b, i, w] = word - (1 << 32) if word >= 1 << 31 else word
        tree.num_nodes[b] = n
    return tree if device is None else DraftTree(*(t.to(device) for t in tree))


def _rows(name: str, values: Any) -> Sequence[Any]:
    rows = _list(values)
    if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence) for row in rows):
        raise ValueError(
            f"{name}: expected 2 dimensions, [B, N] as a tensor or nested lists, got {rows!r:.80}"
        )
    return rows


def empty_candidates(batch: int, top_k: int, levels: int, *, device: Any = None) -> tuple[Candidates, Beam]:
    """Uninitialised buffers (torch) for growing trees of `levels` levels with `expand_tree`."""
    batch, top_k = integer("batch", batch, 0), integer("top_k", top_k, 1, MAX_TOP_K)
    levels = integer("levels", levels, 1, MAX_BRANCHING_LEVELS if top_k > 1 else MAX_CANDIDATES)
    c = top_k + (levels - 1) * top_k * top_k

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=device)

    candidates = Candidates(new(c), new(c, dtype=torch.float32), new(c))
    words = (levels * top_k + 31) // 32
    return candidates, Beam(
        new(top_k), new(top_k, dtype=torch.float32), new(top_k), new(top_k), new(top_k, words)
    )


def expand_tree(
    tokens: Any,
    log_probs: Any,
    candidates: Candidates,
    beam: Beam,
    *,
    level: int,
    levels: int | None = None,
    num_accepted: Any = None,
    shape: TreeShape | None = None,
) -> Beam:
    """Adds one level: scores its candidates and replaces the beam by the level's K best; of a static tree, by
    the level's nodes that have children.

    Scores are fp32 sums of log-probabilities, which count as at most 0 (NaN as -inf), so that a child never
    outranks its parent.

    Args:
        tokens: ``[B, R, K]`` int32, target ids of the children of every parent row, best first. R = 1 at
            level 1 (the root), K after it (the beam's rows).
        log_probs: ``[B, R, K]`` float32.
        candidates: this level's slice is written.
        beam: read (level > 1) and written.
        level: level of the new candidates, from 1. levels: levels of the whole tree; at most 31 where K > 1
            and ``K + (levels - 1) * K**2`` candidates at most 8192; default: the shape's.
        num_accepted: ``[B]`` int32; negative: the request is absent and left alone.
        shape: A static tree of this K and at least `levels` levels: candidates outside score -inf, and so do
            rows of the beam without a node (candidate -1, token 0). None: dynamic.

    Returns:
        `beam`.

    Raises:
        ValueError: wrong dtype, shape, device, range or layout, naming the argument.

    Source: EAGLE-2 (Li et al., arXiv 2406.16858), section 4.1; static trees: EAGLE-1 (arXiv 2401.15077).
    """
    levels = levels_of(levels, shape)
    _C.expand_tree(tokens, log_probs, level, levels, num_accepted, *candidates, *beam, shape)
    return beam


def levels_of(levels: int | None, shape: TreeShape | None) -> int:
    """`levels` of an op's call, the shape's where it is not given."""
    if shape is not None and not isinstance(shape, TreeShape):
        raise ValueError(f"shape: expected a TreeShape or None, got {type(shape).__name__}")
    if levels is None:
        if shape is None:
            raise ValueError("levels: expected a number where no shape is given, got None")
        return shape.levels
    return levels


def build_tree(
    root_tokens: Any,
    candidates: Candidates,
    *,
    max_nodes: int | None = None,
    node_limit: Any = None,
    order: str = "path",
    selected: Any = None,
    out: DraftTree | None = None,
) -> DraftTree:
    """The root and the best candidates, as a DraftTree.

    A candidate counts with the smallest score on its way from the root, so that a chosen child's parent is
    always chosen; with scores from `expand_tree` that is its own score. Ties go to the smaller flat index.
    Scores of -inf or NaN are never chosen, nor are candidates whose parent is neither -1 nor an earlier
    candidate, nor what hangs below those.

    Args:
        root_tokens: ``[B]`` int32.
        candidates: tokens, scores and parents, ``[B, C]``, C at most 8192.
        max_nodes: width N of the tree, root included, at most 256; taken from `out` if given.
        node_limit: ``[B]`` int32, nodes wanted, root included; clamped to 0 .. N; 0: the request is absent.
        order: "path": root, then the chain of best-scoring children, then flat order, so that an accepted
            best path is already in place; "candidate": flat order, as EAGLE and SGLang number nodes.
        selected: ``[B, N]`` int32 to receive the flat candidate of each node (-1: the root and unused slots).
        out: tree to write into.

    Raises:
        ValueError: wrong dtype, shape, device, range or layout, naming the argument.

    Source: EAGLE-2 (Li et al., arXiv 2406.16858), section 4.2.
    """
    if out is None:
        integer("max_nodes", max_nodes, 1, MAX_TREE_NODES)
        out = _allocate(root_tokens, *shape_of("root_tokens", root_tokens, 1), max_nodes)
    _C.build_tree(root_tokens, *candidates, node_limit, order, *out, selected)
    return out


def retrieve_indices(
    tree: DraftTree,
    *,
    max_leaves: int | None = None,
    max_path: int | None = None,
    out: RetrieveIndices | None = None,
) -> RetrieveIndices:
    """EAGLE's form of a tree: per leaf the node indices from the root, padded -1.

    Nodes that do not hang from the root are left out; what exceeds `max_leaves` or `max_path` (default N) is
    cut. `tree.parents` and `tree.num_nodes` are read. Raises ValueError on wrong dtype, shape, device or
    layout.
    """
    if out is None:
        batch, nodes = shape_of("parents", tree.parents, 2)
        leaves = nodes if max_leaves is None else integer("max_leaves", max_leaves, 0)
        shape = (batch, leaves, nodes if max_path is None else integer("max_path", max_path, 0))
        out = RetrieveIndices(
            empty(tree.parents, shape, torch.int32), empty(tree.parents, (batch,), torch.int32)
        )
    _C.retrieve_indices(tree.parents, tree.num_nodes, *out)
    return out
