"""The key/value cache of one layer, and its compaction after acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from eagle_cuda._extension import _C

_compact_kv = _C.compact_kv


class KVCache(NamedTuple):
    """One layer's keys and values. Row t of request b: slot t % page_size of `page_table[b, t // page_size]`.

    k, v: [num_pages, page_size, num_kv_heads, head_dim], float32, bfloat16, float16 or float8_e4m3fn; any
        outer strides, the last dimension contiguous.
    page_table: [B, max_pages] int32, or None for a contiguous cache: request b owns page b. Rows of pages
        outside [0, num_pages) are neither read nor written.
    k_scale, v_scale: None, or the factors of a cache of 1-byte elements (float8_e4m3fn, int8, uint8), both of
        one kind. [num_pages, page_size, num_kv_heads] float32, the last dimension contiguous: one for each
        row and head, which `append_kv` writes and `compact_kv` moves with the rows. [1] float32: one for the
        whole tensor, given by the caller and never written. Attention takes float8_e4m3fn with both factors,
        for queries of float32, bfloat16 or float16; the draft takes no factors.
    """

    k: Any
    v: Any
    page_table: Any = None
    k_scale: Any = None
    v_scale: Any = None

    @classmethod
    def empty(
        cls,
        batch_size: int,
        max_rows: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        row_scales: bool = False,
    ) -> KVCache:
        """A cache for `batch_size` requests of up to `max_rows` rows each, uninitialised.

        page_size None: contiguous. Otherwise as many pages as all requests need, dealt out to them in order.
        row_scales: with k_scale and v_scale for each row and head.
        """
        if page_size is None:
            shape = (batch_size, max_rows, num_kv_heads, head_dim)
            table = None
        else:
            pages = -(-max_rows // page_size)
            shape = (batch_size * pages, page_size, num_kv_heads, head_dim)
            table = torch.arange(batch_size * pages, dtype=torch.int32, device=device).view(batch_size, pages)
        return cls(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
            table,
            *(torch.empty(shape[:3], device=device) for _ in range(2 * row_scales)),
        )


def _same_table(layer: int, table: Any, first: Any) -> None:
    """Another object may still be the same memory."""
    if table is not None and first is not None and table.shape == first.shape:
        pointers = [getattr(t, "data_ptr", None) for t in (table, first)]
        if all(pointers) and pointers[0]() == pointers[1]():
            return
    raise ValueError(
        f"caches[{layer}].page_table: expected that of caches[0], which all layers share, got another one"
    )


def refuse_scales(*caches: Any) -> None:
    """For ops that would compute with the elements as they are."""
    for cache in caches:
        for name in ("k_scale", "v_scale"):
            if getattr(cache, name, None) is not None:
                raise ValueError(f"{name}: expected None (the draft reads no scales), got a tensor")


def compact_kv(
    caches: Sequence[KVCache],
    path: Any,
    num_accepted: Any,
    seq_lens: Any,
    *,
    page_table: Any = None,
    max_nodes: int,
) -> None:
    """Moves the accepted nodes' rows, and their scales, to the end of the prefix, in place, in all layers.

    Row seq_lens[b] + path[b, i] goes to row seq_lens[b] + i for i = 1 .. num_accepted[b]; nothing moves where
    path[b, i] == i. Entries below i or at or beyond max_nodes are malformed: the request is left alone from
    there on.

    caches: one KVCache a layer, of float32, bfloat16, float16, int32, int8, uint8 or
        float8_e4m3fn, no memory twice. All share one page table: `page_table`, or
        that of the first cache. Factors for a whole tensor stay as they are.
    path: [B, P] int32, node indices from the root, as `verify` returns them.
    num_accepted, seq_lens: [B] int32; seq_lens as before acceptance.
    max_nodes: nodes that a tree may have, 1 to 256.

    Raises ValueError for wrong shapes, dtypes or devices.
    """
    if page_table is None and caches:
        page_table = caches[0].page_table
        for i, cache in enumerate(caches):
            if cache.page_table is not page_table:
                _same_table(i, cache.page_table, page_table)
    _compact_kv(
        [c.k for c in caches],
        [c.v for c in caches],
        [c.k_scale for c in caches],
        [c.v_scale for c in caches],
        page_table,
        path,
        num_accepted,
        seq_lens,
        max_nodes,
    )
