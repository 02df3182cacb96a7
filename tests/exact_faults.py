"""What bit-exactness rests on, broken one thing at a time, at the seams where the loop calls the ops.

Each is what a working engine might well do: plain and speculative decoding both stay plausible, and no shape
is wrong. test_exactness.py must see every one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

import eagle_decode.engine as engine
import eagle_decode.models.llama as llama
import exact_runs
from eagle_cuda.attention import tree_attention
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import PackedWeight, linear, pack_weight, unpack_weight
from eagle_cuda.sampling import Sampled, sample_tokens
from eagle_cuda.tree import DraftTree
from eagle_cuda.verify import Accepted, verify
from eagle_decode.constraints import Constraints
from eagle_decode.sampling import SamplingParams
from exact_draws import Draw

Fault = Callable[[], contextlib.AbstractContextManager]


def patched(module: Any, name: str) -> Callable[[Callable[..., Any]], Fault]:
    """Makes a fault of a function that stands in for an op."""

    def fault(function: Callable[..., Any]) -> Fault:
        @contextlib.contextmanager
        def broken() -> Iterator[None]:
            with mock.patch.object(module, name, function):
                yield

        broken.__doc__ = function.__doc__
        return broken

    return fault


# ---- rows

_reversed: dict[int, tuple[PackedWeight, PackedWeight]] = {}


def _reverse(weight: PackedWeight) -> PackedWeight:
    if id(weight) not in _reversed:  # the original is kept too, so that its id stays its own
        made = pack_weight(unpack_weight(weight).flip(1).contiguous(), weight.format, paired=weight.paired)
        _reversed[id(weight)] = weight, made
    return _reversed[id(weight)][1]


@patched(llama, "linear")
def products_by_rows(x: Any, weight: PackedWeight, *, rms_norm: Any = None, **options: Any) -> Any:
    """More than 8 rows are summed from the other end of K: another kernel for wide loads."""
    if x.shape[0] <= 8:
        return linear(x, weight, rms_norm=rms_norm, **options)
    norm = None if rms_norm is None else rms_norm.flip(0)
    return linear(x.flip(1), _reverse(weight), rms_norm=norm, **options)


@patched(llama, "tree_attention")
def attention_by_batch(q: Any, cache: KVCache, *, mask: Any, **options: Any) -> Any:
    """Batches of two or more are computed one precision lower, as a kernel with less room would."""
    if len(q) < 2 or q.dtype != torch.float32:
        return tree_attention(q, cache, mask=mask, **options)
    return tree_attention(q.bfloat16().float(), cache, mask=mask, **options)


# ---- order of keys


def in_lanes(by_slot: bool) -> Fault:
    """Attention whose sums run in four lanes, dealt out by the keys' position, or by their slot: what a
    kernel does that walks the cache in the order in which it lies there."""

    def attend(q: Any, cache: KVCache, *, seq_lens: Any, num_nodes: Any, mask: Any, out: Any, **options: Any):
        scale, window = np.float32(options["softmax_scale"]), options["window"]
        for b in range(len(q)):
            length, count = int(seq_lens[b]), int(num_nodes[b])
            keys, values = (_rows(pool, cache.page_table, b, length + count) for pool in (cache.k, cache.v))
            for i in range(count):
                words = mask[b, i].numpy().view(np.uint32)
                ancestors = [s for s in range(i + 1) if s == i or int(words[s // 32]) >> s % 32 & 1]
                rows = np.array([*range(length), *(length + s for s in ancestors)])
                positions = np.arange(len(rows))
                seen = positions > len(rows) - 1 - window if window else positions >= 0
                rows, positions = rows[seen], positions[seen]
                row = q[b, i].float().numpy()
                out[b, i] = torch.from_numpy(
                    _attend(row, keys[rows], values[rows], rows if by_slot else positions, scale)
                )
        return out

    return patched(llama, "tree_attention")(attend)


def _rows(pool: Any, table: Any, request: int, count: int) -> np.ndarray:
    """[count, Hkv, D] float32."""
    if table is None:
        return pool[request, :count].float().numpy()
    positions, size = torch.arange(count), pool.shape[1]
    return pool[table[request].long()[positions // size], positions % size].float().numpy()


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, places: np.ndarray, scale: np.float32) -> np.ndarray:
    """[Hq, D] of one node over the keys that it sees, in the order given; key j goes to lane places[j] % 4.
    Every sum is sequential, every function one of its argument alone."""
    group = len(q) // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))  # [S, Hq, D]
    scores = np.ascontiguousarray(q[None] * k).sum(axis=-1) * scale  # [S, Hq]
    p = np.exp((scores - scores.max(axis=0)).astype(np.float64)).astype(np.float32)
    total, sums = np.zeros_like(p[0]), np.zeros_like(v[0])
    for lane in range(4):
        own = places % 4 == lane
        if own.any():
            total += np.add.accumulate(p[own], axis=0)[-1]
            sums += np.add.accumulate(p[own, :, None] * v[own], axis=0)[-1]
    return sums / total[:, None]


# ---- noise and choice


def _only_for_noise(options: dict[str, Any]) -> bool:
    """Whether positions decide nothing else."""
    state = options.get("state")
    return state is None or state.min_new_tokens is None


@patched(engine, "sample_tokens")
def noise_by_step(logits: Any, *, positions: Any, **options: Any) -> Sampled:
    """All nodes of a tree share the noise of their cycle."""
    if _only_for_noise(options):
        positions = positions[:, :1].expand_as(positions).contiguous()
    return sample_tokens(logits, positions=positions, **options)


@patched(engine, "sample_tokens")
def noise_by_slot(logits: Any, *, positions: Any, **options: Any) -> Sampled:
    """Noise belongs to the slot of a node: right in chains, wrong in trees."""
    if _only_for_noise(options):
        slots = torch.arange(positions.shape[1], dtype=torch.int32)
        positions = positions[:, :1] + slots
    return sample_tokens(logits, positions=positions, **options)


@patched(engine, "sample_tokens")
def noise_by_row(logits: Any, *, seeds: Any, **options: Any) -> Sampled:
    """Noise depends on the row of the batch in which a request stands."""
    return sample_tokens(logits, seeds=seeds + torch.arange(len(seeds)), **options)


@patched(engine, "sample_tokens")
def ties_by_slot(logits: Any, *, temperature: Any, **options: Any) -> Sampled:
    """Equal logits: the lowest id at the root, the highest at every other node."""
    sampled = sample_tokens(logits, temperature=temperature, **options)
    if options.get("state") is None:
        highest = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1).int()
        greedy = (temperature < 1e-5)[:, None].expand_as(highest).clone()
        greedy[:, 0] = False
        sampled.tokens[greedy] = highest[greedy]
    return sampled


@patched(engine, "sample_tokens")
def penalties_without_ancestors(logits: Any, *, tree: DraftTree | None = None, **options: Any) -> Sampled:
    """A node's penalties see what was emitted and its own token, none of the drafts between."""
    if tree is not None:
        tree = tree._replace(parents=tree.parents.clamp(max=0))
    return sample_tokens(logits, tree=tree, **options)


@patched(engine, "sample_tokens")
def one_mask_for_all_nodes(logits: Any, *, state: Any = None, **options: Any) -> Sampled:
    """Every node is held to the tokens that may follow the root."""
    if state is not None and state.token_mask is not None:
        state = state._replace(token_mask=state.token_mask[:, :1].expand_as(state.token_mask))
    return sample_tokens(logits, state=state, **options)


@patched(engine, "sample_tokens")
def least_length_of_the_root(logits: Any, *, positions: Any, state: Any = None, **options: Any) -> Sampled:
    """Whether stop tokens are allowed yet is decided at the root, for the whole tree."""
    if state is not None and state.min_new_tokens is not None:
        early = positions[:, 0] < state.prompt_lens + state.min_new_tokens
        state = state._replace(min_new_tokens=early.int() << 20)
    return sample_tokens(logits, positions=positions, state=state, **options)


# ---- ends and rows


@patched(engine, "verify")
def stops_overlooked_in_trees(tree: DraftTree, *args: Any, stop_tokens: Any, **options: Any) -> Accepted:
    """A stop token ends a request only where nothing was drafted."""
    if tree.tokens.shape[1] > 1:
        stop_tokens = None
    return verify(tree, *args, stop_tokens=stop_tokens, **options)


@patched(engine, "verify")
def budget_of_the_root(tree: DraftTree, *args: Any, budget: Any, **options: Any) -> Accepted:
    """A tree that is let in is accepted whole, one token beyond the budget if need be."""
    return verify(tree, *args, budget=budget + (tree.num_nodes > 1).int(), **options)


@contextlib.contextmanager
def rows_left_where_they_were() -> Iterator[None]:
    """Nothing is compacted. The runs patch the engine's compact_kv themselves, below this."""
    with mock.patch.object(exact_runs, "compact_kv"):
        yield


def _any(draw: Draw) -> bool:
    return True


def _forked(draw: Draw) -> bool:
    return draw.tree.branching > 1


def _hot(draw: Draw) -> bool:
    return all(params.temperature > 0.1 for _, params in draw.requests)


def _ties(draw: Draw) -> bool:
    params = [params for _, params in draw.requests]
    return draw.model.twins and any(p.temperature < 1e-5 for p in params) and not Constraints.needed(params)


def _asks(name: str) -> Callable[[Draw], bool]:
    """Some request asks for it."""
    default = getattr(SamplingParams(), name)
    return lambda draw: any(getattr(params, name) != default for _, params in draw.requests)


def _ends_early(draw: Draw) -> bool:
    return any(params.min_new_tokens and params.stop_token_ids for _, params in draw.requests)


# Name -> the fault, and configurations that it can show in.
FAULTS: dict[str, tuple[Fault, Callable[[Draw], bool]]] = {
    "products by rows": (products_by_rows, _any),
    "attention by batch": (attention_by_batch, lambda draw: draw.model.dtype == "float32"),
    "keys by slot": (in_lanes(by_slot=True), _forked),
    "noise by step": (noise_by_step, _hot),
    "noise by slot": (noise_by_slot, lambda draw: _hot(draw) and _forked(draw)),
    "noise by row": (noise_by_row, _hot),
    "ties by slot": (ties_by_slot, _ties),
    "penalties without ancestors": (penalties_without_ancestors, _asks("frequency_penalty")),
    "one mask for all nodes": (one_mask_for_all_nodes, _asks("logits_mask")),
    "least length of the root": (least_length_of_the_root, _ends_early),
    "stops overlooked in trees": (stops_overlooked_in_trees, _asks("stop_token_ids")),
    "budget of the root": (budget_of_the_root, _any),
    "rows left where they were": (rows_left_where_they_were, _forked),
}
