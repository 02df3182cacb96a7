"""Rotary embedding with cache write, and attention of tree nodes to the prefix and to their ancestors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from eagle_cuda._allocate import Workspaces, empty, integer, shape_of
from eagle_cuda._extension import _C
from eagle_cuda.kv_cache import KVCache

_append_kv = _C.append_kv
_tree_attention = _C.tree_attention


class RopeTable(NamedTuple):
    """cos, sin: [max_positions, rotary_dim / 2] float32, made in float64; attention factors are folded in."""

    cos: torch.Tensor
    sin: torch.Tensor


def append_kv(
    q: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    *,
    seq_lens: Any,
    depths: Any,
    num_nodes: Any,
    cos: Any = None,
    sin: Any = None,
    interleaved: bool = False,
    q_norm: Any = None,
    k_norm: Any = None,
    eps: float = 1e-6,
    q_out: Any = None,
) -> Any:
    """Normalises and rotates q and k of every node, writes k and v into the cache, returns the rotated q.

    q: [B, N, Hq, D]; k, v: [B, N, Hkv, D], of the cache's dtype, or any of float32, bfloat16 and float16 for
        a cache of float8_e4m3fn. Node i of request b is written at row seq_lens[b] + i and rotated for
        position seq_lens[b] + depths[b, i]. N is at most 256, D 1 to 256.
    seq_lens, num_nodes: [B] int32; depths: [B, N] int32. Nodes at and beyond num_nodes are left alone.
    cos, sin: [max_positions, rotary_dim / 2] float32 (`rope_table`), or None: no rotation. Positions beyond
        the table take its last row: make it long enough.
    interleaved: rotate pairs (2i, 2i + 1) (GPT-J) instead of (i, i + rotary_dim / 2) (GPT-NeoX, Hugging
        Face).
    q_norm, k_norm: [D], weights of an RMS norm over each head before the rotation (Qwen3), with `eps`.
    q_out: [B, N, Hq, D], may be q.

    Arithmetic in float32, rounded once. A cache of float8_e4m3fn receives codes round(x / scale), to nearest
    even and within +-448. With factors for rows and heads the scale is max |x| / 448 of the row and head, and
    is written too: 0 for zeros; NaN, with codes 0, where the row holds NaN or an infinity. With a factor for
    the tensor, which must be above 0, that one is used: infinities become +-448, NaN stays NaN.

    Raises ValueError for wrong shapes, dtypes, layouts or devices, for a cache of float8_e4m3fn without both
    factors and for any other with one.
    Source: Su et al., RoFormer, arXiv 2104.09864.
    """
    if q_out is None:
        q_out = _empty_like(q)
    _append_kv(
        q,
        k,
        v,
        cache.k,
        cache.v,
        cache.page_table,
        seq_lens,
        depths,
        num_nodes,
        cos,
        sin,
        interleaved,
        q_norm,
        k_norm,
        eps,
        q_out,
        cache.k_scale,
        cache.v_scale,
    )
    return q_out


def tree_attention(
    q: Any,
    cache: KVCache,
    *,
    seq_lens: Any,
    num_nodes: Any,
    mask: Any,
    softmax_scale: float | None = None,
    window: int = 0,
    logit_softcap: float = 0.0,
    sinks: Any = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> Any:
    """Attention of every tree node to the seq_lens[b] committed rows, to its ancestors and to itself.

    q: [B, N, Hq, D], rotated (`append_kv`), of the cache's dtype, or any of float32, bfloat16 and float16 for
        a cache of float8_e4m3fn; N at most 256, Hq a multiple of the cache's heads, D one of 64, 80, 96,
        128, 192, 256.
    seq_lens, num_nodes: [B] int32. Node i of request b has its key at row seq_lens[b] + i.
    mask: [B, N, ceil(N / 32)] int32, ancestor-or-self bits. A node always sees itself.
    softmax_scale: default 1 / sqrt(D). window: a node sees the last `window` positions, itself included; 0:
        all.
    logit_softcap: scaled scores s become cap * tanh(s / cap) (Gemma 2); 0: they stay.
    sinks: None, or [Hq] float32, learned logits of the heads that join the denominators of their softmax and
        have no value (gpt-oss): whatever the window, and not subject to the cap.
    out: [B, N, Hq, D]; rows at and beyond num_nodes are left alone. lse: [B, N, Hq] float32, receives the
        natural log of the sum of exponentials, the sink's included.
    workspace: None, or uint8 [`tree_attention_workspace_bytes`] on the device of q, used by one call at a
        time. None takes one that is kept for each device and stream and grows as needed: give your own where
        a CUDA graph captures the call, so that its memory lives as long as the graph.

    A node's ancestors count as standing at positions seq_lens[b], seq_lens[b] + 1, ... in order of depth,
    wherever they lie (on CUDA, forks at most 31 levels above it; beyond, its row is NaN, float32 apart; a
    trunk or a chain may be longer): its result is bit for bit that of plain decoding after the same
    tokens, in any batch, tree, page layout and number of threads. Of a cache of float8_e4m3fn, k's factor
    multiplies the score and v's the value. Raises ValueError for wrong shapes, dtypes, layouts, devices or
    head sizes, for a cache of float8_e4m3fn without both factors and for any other with one.
    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867; Dao et al.,
        arXiv 2205.14135. Soft cap: Gemma 2, arXiv 2408.00118. Sinks: OpenAI, gpt-oss, arXiv 2508.10925.
    """
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(shape_of("q", q, 4)[3], 1))
    if out is None:
        out = _empty_like(q)
    if workspace is None and isinstance(q, torch.Tensor) and q.is_cuda:
        workspace = _workspaces.of(q, tree_attention_workspace_bytes(q, cache))
    _tree_attention(
        q,
        cache.k,
        cache.v,
        cache.page_table,
        seq_lens,
        num_nodes,
        mask,
        softmax_scale,
        window,
        out,
        lse,
        logit_softcap,
        sinks,
        cache.k_scale,
        cache.v_scale,
        workspace,
    )
    return out


def tree_attention_workspace_bytes(q: Any, cache: KVCache) -> int:
    """Bytes of the workspace of `tree_attention` for these shapes on this device; 0 on the CPU.

    Depends on sizes alone: on those of q, on the cache's heads and on the positions that a request can have.
    """
    return _C.tree_attention_workspace_bytes(q, cache.k, cache.v, cache.page_table)


def rope_table(
    max_positions: int, head_dim: int, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> RopeTable:
    """cos and sin of position * frequency for positions 0 .. max_positions - 1, computed in float64.

    head_dim: rotated dimensions (even). theta: base of the frequencies theta^(-2 i / head_dim).
    scaling: None, or a mapping as in a Hugging Face configuration (`rope_scaling` or `rope_parameters`), its
        kind under "rope_type" or "type": "default", "linear", "llama3" or "yarn". Kinds whose table depends
        on the length of the running sequence ("dynamic", "longrope") are refused with ValueError: results
        would depend on when a row was made.

    Sources: Su et al., arXiv 2104.09864; Chen et al. (linear), arXiv 2306.15595; Llama 3.1 (llama3); Peng et
        al. (YaRN), arXiv 2309.00071, equations 17 to 22.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: expected an even number of at least 2, got {head_dim}")
    max_positions = integer("max_positions", max_positions, 1)
    if not 0 < theta < math.inf:
        raise ValueError(f"theta: expected a finite number > 0, got {theta}")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ValueError(f"scaling: expected a mapping or None, got {scaling!r}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = float(theta) ** -exponent
    factor = 1.0
    kind = "default" if not scaling else str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "linear":
        frequency = frequency / _number(scaling, "factor")
    elif kind == "llama3":
        frequency = _llama3(frequency, scaling)
    elif kind == "yarn":
        frequency, factor = _yarn(frequency, scaling, head_dim, float(theta))
    elif kind != "default":
        raise ValueError(f"scaling: expected rope_type default, linear, llama3 or yarn, got {kind}")
    angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequency
    return RopeTable((angle.cos() * factor).float(), (angle.sin() * factor).float())


_workspaces = Workspaces()


def _empty_like(q: Any) -> Any:
    shape = shape_of("q", q, 4)
    return np.empty(shape, q.dtype) if isinstance(q, np.ndarray) else empty(q, shape, q.dtype)


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"scaling: expected a value for {key}, got none")
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"scaling: expected a finite number > 0 for {key}, got {value!r}")
    return float(value)


def _llama3(frequency: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = original * frequency / (2.0 * math.pi)  # full turns within the original context
    if high == low:
        return torch.where(turns < low, frequency / factor, frequency)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequency / factor + kept * frequency


def _yarn(
    frequency: torch.Tensor, scaling: Mapping[str, Any], head_dim: int, theta: float
) -> tuple[torch.Tensor, float]:
    """Frequencies, and the factor on cos and sin. Few turns: interpolated; many: kept."""
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    many, few = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)

    def dimension(
        turns: float,
    ) -> float:  # index of the frequency that makes `turns` turns within the original context
        return head_dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first, last = dimension(many), dimension(few)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as the authors' code: no division by zero
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(
        0.0, 1.0
    )

    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = gain(float(one)) / gain(float(all_dims)) if one and all_dims else gain(1.0)
    return interpolated * frequency / factor + (1.0 - interpolated) * frequency, float(attention)
