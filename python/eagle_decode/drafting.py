"""Who proposes: trees of a draft head, or no more than the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eagle_cuda.draft import draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.tree import DraftTree, TreeShape, empty_draft_tree
from eagle_decode.checks import check_coupling, check_tau, check_tree_shape
from eagle_decode.heads.loaded import LoadedHead
from eagle_decode.sampling import SamplingParams
from eagle_decode.sequence import Batch


class Drafter(Protocol):
    """What the loop asks of a drafter: `propose`. The rest is optional, and read where it is present.

    levels: depth of the deepest node it proposes; absent: 4, and what lies deeper is never accepted.
    max_nodes: nodes of its widest tree, the root included; absent: 8. Wider ones are an error.
    feature_layers: what the target captures for it (`models.base.Target.forward`); absent or None: nothing.
    admit(row, tokens, features): a request joins as row `row`; features [T, F] of its prompt's tokens but the
        last, and for each of them the token that followed it, [T] int32.
    move(source, row, length): the request of row `source` now stands in `row`; `length` tokens are committed.
    """

    def propose(self, batch: Batch) -> DraftTree:
        """A tree per row of the batch, [B, N] with any N up to max_nodes, under the roots
        `batch.next_tokens`."""


class RootDrafter:
    """Proposes the root alone: plain decoding."""

    levels = 0
    max_nodes = 1

    def __init__(self, capacity: int, device: torch.device):
        def new(shape: tuple[int, ...], value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self._tree = DraftTree(
            tokens=new((capacity, 1), 0),
            parents=new((capacity, 1), -1),
            depths=new((capacity, 1), 0),
            mask=new((capacity, 1, 1), 1),
            scores=torch.zeros((capacity, 1), dtype=torch.float32, device=device),
            num_nodes=new((capacity,), 1),
            first_child=new((capacity, 1), -1),
            next_sibling=new((capacity, 1), -1),
        )
        self._of_size: dict[int, DraftTree] = {}

    def propose(self, batch: Batch) -> DraftTree:
        """See Drafter."""
        tree = self.tree(len(batch.requests))
        tree.tokens[:, 0] = batch.next_tokens
        return tree

    def tree(self, size: int) -> DraftTree:
        """One-node trees of `size` requests; their tokens are those of the last proposal."""
        if size not in self._of_size:
            self._of_size[size] = DraftTree(*(tensor[:size] for tensor in self._tree))
        return self._of_size[size]


class HeadDrafter:
    """Trees of an EAGLE head. Owns the head's cache: one row per committed token, behind them the nodes being
    grown.

    head: as `heads.load_head` returns it. dtype: of the target's features. capacity: requests at a time.
    max_length: tokens of the longest request.
    levels, top_k, max_nodes: shape of the tree; max_nodes is cut to what levels and top_k can fill.
    tree_shape: a static tree, of these levels, this top_k, and max_nodes - 1 nodes beside the root.
    coupling: how much of the target's own noise ranks the candidates of requests with a temperature > 0: 0,
        none, which is by draft probability alone, to 1, all of it. None: what was measured to be best, by
        request (`default_coupling`). tau: softens the scores of candidates ranked with noise.
    """

    def __init__(
        self, head: LoadedHead, *, dtype: torch.dtype, device: torch.device, capacity: int, max_length: int,
        levels: int, top_k: int, max_nodes: int, tree_shape: TreeShape | None = None,
        coupling: float | None = None, tau: float = 1.0,
    ):  # fmt: skip
        check_coupling(coupling)
        check_tau(tau)
        if tree_shape is not None:
            check_tree_shape(tree_shape)
            wanted = (tree_shape.levels, tree_shape.top_k)
            if (levels, top_k) != wanted:
                raise ValueError(f"levels, top_k: expected the tree_shape's {wanted}, got {(levels, top_k)}")
        if top_k > head.draft_vocab_size:
            name = "draft_top_k" if tree_shape is None else "tree_shape.top_k"
            raise ValueError(
                f"{name}: expected at most the draft vocabulary's {head.draft_vocab_size}, got {top_k}"
            )
        if head.feature_layers is None:
            raise ValueError(
                "head: its feature layers are unknown; load it with target_config= or feature_layers="
            )
        self.levels, self._top_k, self._shape = levels, top_k, tree_shape
        self.max_nodes = min(max_nodes, self._most_nodes(levels))
        self.feature_layers = head.feature_layers
        self._coupling, self._tau = None if coupling is None else float(coupling), float(tau)
        # Nodes that the last levels grow stand behind max_length; angles beyond the table would repeat its
        # last row.
        rows = max_length + levels * top_k + 1
        self.head = head.to_draft_head(dtype, max_positions=max_length + levels + 1)
        shape = (len(head.layers), 2, capacity, rows, head.num_kv_heads, self.head.head_dim)
        memory = torch.empty(shape, dtype=dtype, device=device)
        self._caches = [KVCache(layer[0], layer[1]) for layer in memory]
        self._caches_of: dict[int, list[KVCache]] = {}
        self._trees: dict[tuple[int, int], DraftTree] = {}
        self._no_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._device = device
        self._temperature = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._temperature_is_of: list[SamplingParams | None] = [None] * capacity
        self._plain = RootDrafter(capacity, device)

    def admit(self, row: int, tokens: Tensor, features: Tensor) -> None:
        """See Drafter: fills the head's cache with the prompt."""
        if len(tokens):
            caches = rows_of(self._caches, slice(row, row + 1))
            extend_draft(self.head, features, tokens, [0, len(tokens)], self._no_rows, caches)

    def move(self, source: int, row: int, length: int) -> None:
        """See Drafter."""
        move_rows(self._caches, source, row, length)

    def propose(self, batch: Batch) -> DraftTree:
        """See Drafter: extends the cache by the accepted tokens, then grows a tree no larger than the budgets
        can use."""
        most = max(request.remaining for request in batch.requests)
        least = min(request.remaining for request in batch.requests)
        width = self._useful_nodes(most)
        if (
            width == 1
        ):  # every request ends with this cycle, or trees are not wanted: the cache may stay behind
            return self._plain.propose(batch)
        levels = min(self.levels, most - 1)
        limit = None
        if self._useful_nodes(least) < width:
            limits = [self._useful_nodes(request.remaining) for request in batch.requests]
            limit = torch.tensor(limits, dtype=torch.int32, device=self._device)
        size = len(batch.requests)
        return draft(
            self.head, batch.features, batch.sampled.tokens, batch.accepted, batch.seq_lens,
            self._caches_for(size), top_k=self._top_k, levels=levels, shape=self._shape, node_limit=limit,
            tau=self._tau, temperature=self._temperature_of(batch), seeds=batch.seeds,
            out=self._tree(size, width),
        )  # fmt: skip

    def _temperature_of(self, batch: Batch) -> Tensor:
        """[B]: what the noise counts for in each row's ranking. Written only where a row has another request
        than before."""
        for row, request in enumerate(batch.requests):
            params = request.params
            if self._temperature_is_of[row] is not params:
                coupling = default_coupling(params) if self._coupling is None else self._coupling
                self._temperature_is_of[row] = params
                self._temperature[row] = coupling * params.temperature
        return self._temperature[: len(batch.requests)]

    def _most_nodes(self, levels: int) -> int:
        if self._shape is not None:
            return 1 + self._shape.nodes_within(levels)
        return 1 + self._top_k + max(levels - 1, 0) * self._top_k**2 if levels else 1

    def _useful_nodes(self, remaining: int) -> int:
        """Nodes that can be emitted when `remaining` tokens are allowed: the root's child is the second of
        them."""
        return min(self.max_nodes, self._most_nodes(min(self.levels, max(remaining - 1, 0))))

    def _caches_for(self, size: int) -> list[KVCache]:
        if size not in self._caches_of:
            self._caches_of[size] = rows_of(self._caches, slice(0, size))
        return self._caches_of[size]

    def _tree(self, size: int, width: int) -> DraftTree:
        if (size, width) not in self._trees:
            self._trees[size, width] = empty_draft_tree(size, width, like=self._no_rows)
        return self._trees[size, width]


def default_coupling(params: SamplingParams) -> float:
    """The coupling measured to be best for such a request: less where the tail, which noise lifts, is cut off
    (docs/coupled_drafting.md)."""
    return 0.6 if params.top_k > 0 or params.min_p > 0 else 0.8


def rows_of(caches: Sequence[KVCache], rows: slice) -> list[KVCache]:
    """The contiguous caches of some of the requests."""
    return [KVCache(cache.k[rows], cache.v[rows]) for cache in caches]


def move_rows(caches: Sequence[KVCache], source: int, row: int, length: int) -> None:
    """Copies the first `length` rows of request `source` to request `row` in every cache."""
    for cache in caches:
        cache.k[row, :length] = cache.k[source, :length]
        cache.v[row, :length] = cache.v[source, :length]
