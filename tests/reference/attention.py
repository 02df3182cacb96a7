"""Naive attention and rotary embedding, one row at a time, written from the comments of attention.h."""

from __future__ import annotations

import math

import torch


def ancestors(parents: list[int], node: int) -> list[int]:
    """Slots of the node's ancestors and itself, root first."""
    chain = []
    while node >= 0:
        chain.append(node)
        node = parents[node]
    return chain[::-1]


def mask_words(parents: list[int], width: int) -> torch.Tensor:
    """[width, ceil(width / 32)] int32 ancestor-or-self bits; zero for slots beyond the tree."""
    rows = []
    for node in range(width):
        bits = sum(1 << slot for slot in ancestors(parents, node)) if node < len(parents) else 0
        words = [bits >> 32 * w & 0xFFFFFFFF for w in range(-(-width // 32))]
        rows.append([w - (1 << 32) if w >= 1 << 31 else w for w in words])
    return torch.tensor(rows, dtype=torch.int32).reshape(width, -(-width // 32))


def attend(
    q, k, v, seq_len, slots, *, scale, window=0, missing=(), softcap=0.0, sinks=None, dtype=torch.float64
):
    """One node: (out, lse). q [Hq, D]; k, v [rows, Hkv, D]; slots: its ancestors and itself, root first."""
    rows = list(range(seq_len)) + [seq_len + slot for slot in slots]  # index = position
    first = max(0, len(rows) - window) if window else 0
    seen = [row for row in rows[first:] if row not in missing]
    group = q.shape[0] // k.shape[1]
    keys = k[seen].to(dtype).repeat_interleave(group, dim=1)
    values = v[seen].to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,khd->hk", q.to(dtype), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:  # one more key without a value
        scores = torch.cat([scores, sinks.to(dtype)[:, None]], dim=-1)
        values = torch.cat([values, torch.zeros(1, *values.shape[1:], dtype=dtype)])
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hk,khd->hd", weights, values), torch.logsumexp(scores, dim=-1)


def encode(x, scale=None):
    """(codes, scale) of x [..., D] as float8_e4m3fn. scale: the tensor's; None: one a row, max |x| / 448,
    0 for a row of zeros, NaN for one that is not finite; both have codes 0."""
    x = x.float()
    if scale is None:
        largest = x.abs().amax(dim=-1)
        scale = torch.where(torch.isfinite(x).all(dim=-1), largest / 448.0, math.nan)
        by = scale[..., None]
    else:
        by = scale
    codes = torch.where(by > 0, x / by, 0.0).clamp(-448.0, 448.0)
    return codes.to(torch.float8_e4m3fn), scale


def rotate(x, position, cos, sin, *, interleaved=False, norm=None, eps=1e-6, dtype=torch.float64):
    """x [heads, D] of one node: RMS norm over each head, then rotation of the first dimensions."""
    x = x.to(dtype)
    if norm is not None:
        x = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * norm.to(dtype)
    half = cos.shape[1]
    out = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].to(dtype), sin[position, i].to(dtype)
        out[:, a] = x[:, a] * c - x[:, b] * s
        out[:, b] = x[:, b] * c + x[:, a] * s
    return out


def angles(max_positions: int, dim: int, theta: float) -> torch.Tensor:
    """position * theta^(-2 i / dim), float64."""
    return torch.tensor(
        [[p * math.pow(theta, -2 * i / dim) for i in range(dim // 2)] for p in range(max_positions)],
        dtype=torch.float64,
    )
