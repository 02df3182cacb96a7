"""Requests of an attention test, free of any layout, and the caches and batches made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compare import assert_close_to_fp64, assert_same_bits
from eagle_cuda.attention import tree_attention
from eagle_cuda.kv_cache import KVCache
from reference import attention as reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAN = float("nan")


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tree(nodes: int, generator: torch.Generator, branch: int = 4) -> list[int]:
    """Parents of a random tree in which parents precede their children."""
    draws = torch.rand(max(nodes, 1), generator=generator).tolist()
    return [-1] + [max(0, i - 1 - int(draws[i] * branch)) for i in range(1, nodes)]


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


@dataclass
class Request:
    """Keys and values by cache row, queries by slot: what a result may depend on, free of any layout."""

    seq_len: int
    parents: list[int]
    q: torch.Tensor  # [nodes, Hq, D]
    k: torch.Tensor  # [seq_len + nodes, Hkv, D]
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # of float8 codes: [rows, Hkv], or [1] of the tensor
    v_scale: torch.Tensor | None = None

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they count, float64 where they are codes."""
        if self.k_scale is None:
            return self.k, self.v
        pairs = ((self.k, self.k_scale), (self.v, self.v_scale))
        return tuple(x.double() * (s if s.ndim == 1 else s[..., None]) for x, s in pairs)

    def moved(self, seq_len: int, parents: list[int], slots: list[int], rows: list[int]) -> Request:
        """The queries of `slots` and the keys of `rows`."""
        scales = (s if s is None or s.ndim == 1 else s[rows] for s in (self.k_scale, self.v_scale))
        k, v = (
            x.view(torch.uint8)[rows].view(x.dtype) if x.itemsize == 1 else x[rows] for x in (self.k, self.v)
        )
        return Request(seq_len, parents, self.q[slots], k, v, *scales)

    def path(self, node: int) -> Request:
        """The chain of the node's ancestors: the same keys at the same positions, in other slots."""
        slots = reference.ancestors(self.parents, node)
        rows = list(range(self.seq_len)) + [self.seq_len + s for s in slots]
        return self.moved(self.seq_len, chain(len(slots)), slots, rows)

    def plain(self, node: int) -> Request:
        """Plain decoding: a one-node tree, the node's ancestors already committed."""
        p = self.path(node)
        return Request(len(p.k) - 1, [-1], p.q[-1:], p.k, p.v, p.k_scale, p.v_scale)

    def permuted(self, order: list[int]) -> Request:
        """Slot i holds what was in slot order[i]."""
        slot_of = {old: new for new, old in enumerate(order)}
        rows = list(range(self.seq_len)) + [self.seq_len + s for s in order]
        parents = [-1 if self.parents[s] < 0 else slot_of[self.parents[s]] for s in order]
        return self.moved(self.seq_len, parents, order, rows)


def random_request(seq_len, parents, heads, kv_heads, dim, dtype, generator, codes="none") -> Request:
    """codes: keys and values of `dtype` ("none"), or float8 with scales of "rows" or of the "tensor"."""

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    rows = seq_len + len(parents)
    q, k, v = 2 * draw(len(parents), heads, dim), draw(rows, kv_heads, dim), draw(rows, kv_heads, dim)
    if codes == "none":
        return Request(seq_len, parents, q, k, v)
    k, v = (x * torch.rand(rows, kv_heads, 1, generator=generator).add(0.5) for x in (k, v))
    given = (torch.tensor([0.011]), torch.tensor([0.013])) if codes == "tensor" else (None, None)
    (k, k_scale), (v, v_scale) = (reference.encode(x, s) for x, s in zip((k, v), given))
    return Request(seq_len, parents, q, k, v, k_scale, v_scale)


def build_cache(
    requests: list[Request], page_size: int | None, seed: int = 0, spare_rows: int = 3
) -> KVCache:
    """Everything that no request owns is NaN. Pages in random order, dead ids behind them, odd strides."""
    generator = torch.Generator().manual_seed(seed)
    rows = max((len(r.k) for r in requests), default=0) + spare_rows
    _, kv_heads, dim = requests[0].k.shape if requests else (0, 1, 64)
    dtype = requests[0].k.dtype if requests else torch.float32
    size = page_size or rows
    pages = -(-rows // size)
    total = len(requests) * pages + (2 if page_size else 0)
    k = torch.full((total, size + 1, kv_heads, dim + 8), NAN).to(dtype)[:, :size, :, :dim]
    v = torch.full((total, kv_heads, size, dim), NAN).to(dtype).transpose(1, 2)
    order = torch.randperm(total, generator=generator).tolist() if page_size else list(range(total))
    table = torch.full((len(requests), pages + 2), 2**31 - 1, dtype=torch.int32)
    table[:, 1::2] = -7
    for b, request in enumerate(requests):
        for i in range(pages):
            table[b, i] = order[b * pages + i]
        for row in range(len(request.k)):
            page = int(table[b, row // size])
            k[page, row % size] = request.k[row]
            v[page, row % size] = request.v[row]
    table = table[:, : pages + 1] if page_size else None
    if requests and requests[0].k_scale is not None:
        return KVCache(
            k, v, table, *(build_scales(requests, k, table, name) for name in ("k_scale", "v_scale"))
        )
    return KVCache(k, v, table)


def build_scales(
    requests: list[Request], k: torch.Tensor, table: torch.Tensor | None, name: str
) -> torch.Tensor:
    """The tensor's own, or of rows: NaN where no request has a row, strides of their own."""
    if getattr(requests[0], name).ndim == 1:
        return getattr(requests[0], name)
    pages, size, heads = k.shape[:3]
    scale = torch.full((pages, size + 2, heads + 1), NAN)[:, :size, :heads]
    for b, request in enumerate(requests):
        for row, of_heads in enumerate(getattr(request, name)):
            page = b if table is None else int(table[b, row // size])
            scale[page, row % size] = of_heads
    return scale


def attend_batch(
    requests: list[Request], *, page_size=None, seed=0, window=0, width=None, masks=None, **options
):
    """Runs the op; returns (out, lse) of each request's nodes. options: logit_softcap, sinks."""
    heads, dim = requests[0].q.shape[1:]
    dtype = requests[0].q.dtype
    width = width or max(len(r.parents) for r in requests)
    q = torch.full((len(requests), width, heads, dim), NAN).to(dtype)
    mask = torch.full(
        (len(requests), width, -(-width // 32)), -1, dtype=torch.int32
    )  # garbage beyond num_nodes
    for b, r in enumerate(requests):
        n = len(r.parents)
        q[b, :n] = r.q
        mask[b, :n] = reference.mask_words(r.parents, width)[:n] if masks is None else masks[b]
    lse = torch.full((len(requests), width, heads), 77.0)
    out = torch.full_like(q, 77.0)
    tree_attention(
        q,
        build_cache(requests, page_size, seed),
        seq_lens=int32([r.seq_len for r in requests]),
        num_nodes=int32([len(r.parents) for r in requests]),
        mask=mask,
        window=window,
        out=out,
        lse=lse,
        **options,
    )
    for b, r in enumerate(requests):
        assert bool((out[b, len(r.parents) :] == 77.0).all()), "rows beyond num_nodes were written"
        assert bool((lse[b, len(r.parents) :] == 77.0).all())
    return [(out[b, : len(r.parents)], lse[b, : len(r.parents)]) for b, r in enumerate(requests)]


def check_against_fp64(
    request: Request, out, lse, window=0, missing=(), logit_softcap=0.0, sinks=None
) -> None:
    scale = 1.0 / math.sqrt(request.q.shape[-1])
    k, v = request.numbers()
    want, naive = [], []
    for dtype, results in ((torch.float64, want), (torch.float32, naive)):
        for node in range(len(request.parents)):
            results.append(
                reference.attend(
                    request.q[node],
                    k,
                    v,
                    request.seq_len,
                    reference.ancestors(request.parents, node),
                    scale=scale,
                    window=window,
                    missing=missing,
                    softcap=logit_softcap,
                    sinks=sinks,
                    dtype=dtype,
                )
            )
    stack = [torch.stack([r[i] for r in results]) for results in (want, naive) for i in (0, 1)]
    assert_close_to_fp64(out, stack[0], stack[2].to(out.dtype))
    assert_close_to_fp64(lse, stack[1], stack[3])


def same(a, b) -> None:
    """(out, lse) pairs equal to the bit."""
    assert_same_bits(a[0], b[0])
    assert_same_bits(a[1], b[1])


def nodes_of(result, nodes):
    return result[0][nodes], result[1][nodes]
