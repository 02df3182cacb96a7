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

    def path(self, node: int) -> Request:
        """The chain of the node's ancestors: the same keys at the same positions, in other slots."""
        slots = reference.ancestors(self.parents, node)
        rows = list(range(self.seq_len)) + [self.seq_len + s for s in slots]
        return Request(self.seq_len, chain(len(slots)), self.q[slots], self.k[rows], self.v[rows])

    def plain(self, node: int) -> Request:
        """Plain decoding: a one-node tree, the node's ancestors already committed."""
        p = self.path(node)
        return Request(len(p.k) - 1, [-1], p.q[-1:], p.k, p.v)

    def permuted(self, order: list[int]) -> Request:
        """Slot i holds what was in slot order[i]."""
        slot_of = {old: new for new, old in enumerate(order)}
        rows = list(range(self.seq_len)) + [self.seq_len + s for s in order]
        parents = [-1 if self.parents[s] < 0 else slot_of[self.parents[s]] for s in order]
        return Request(self.seq_len, parents, self.q[order], self.k[rows], self.v[rows])


def random_request(seq_len, parents, heads, kv_heads, dim, dtype, generator) -> Request:
    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    rows = seq_len + len(parents)
    return Request(
        seq_len,
        parents,
        2 * draw(len(parents), heads, dim),
        draw(rows, kv_heads, dim),
        draw(rows, kv_heads, dim),
    )


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
    return KVCache(k, v, table[:, : pages + 1] if page_size else None)


def attend_batch(requests: list[Request], *, page_size=None, seed=0, window=0, width=None, masks=None):
    """Runs the op; returns (out, lse) of each request's nodes."""
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
    )
    for b, r in enumerate(requests):
        assert bool((out[b, len(r.parents) :] == 77.0).all()), "rows beyond num_nodes were written"
        assert bool((lse[b, len(r.parents) :] == 77.0).all())
    return [(out[b, : len(r.parents)], lse[b, : len(r.parents)]) for b, r in enumerate(requests)]


def check_against_fp64(request: Request, out, lse, window=0, missing=()) -> None:
    scale = 1.0 / math.sqrt(request.q.shape[-1])
    want, naive = [], []
    for dtype, results in ((torch.float64, want), (torch.float32, naive)):
        for node in range(len(request.parents)):
            results.append(
                reference.attend(
                    request.q[node],
                    request.k,
                    request.v,
                    request.seq_len,
                    reference.ancestors(request.parents, node),
                    scale=scale,
                    window=window,
                    missing=missing,
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
