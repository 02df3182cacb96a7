"""What draft is compared with: the same head and the same search in plain PyTorch.

Generous to the peer: it knows all lengths beforehand, its mask of the prefix is made, and its caches are
dense. All of a cycle stays on the device, so that it can be captured in a CUDA graph; of the two steps that
torch.compile gets, every level uses one. Written from the papers (EAGLE-2: arXiv 2406.16858, EAGLE-3:
2503.01840): it shares no op with eagle_cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from attention_cases import additive
from draft_cases import Cycle
from head_shapes import HeadShape
from torch.nn.functional import linear, log_softmax, scaled_dot_product_attention, silu

EPS = 1e-5


class Dense(NamedTuple):
    """A head of one layer. Matrices [N, K]; of gate_up the first half of the rows is gate."""

    embedding: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    fc: torch.Tensor
    lm_head: torch.Tensor
    post_norm: torch.Tensor
    cos: torch.Tensor  # [positions, D / 2] float32
    sin: torch.Tensor
    input_norm: torch.Tensor | None = None  # these four: EAGLE-3 only
    hidden_norm: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    draft_to_target: torch.Tensor | None = None


class Caches(NamedTuple):
    k: torch.Tensor  # [rows, Hkv, D]
    v: torch.Tensor


class Tree(NamedTuple):
    """The draft nodes in the order in which they were found, without the root; parents as slots of a tree
    whose slot 0 is the root."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


class Beam(NamedTuple):
    tokens: torch.Tensor  # [K] target ids
    hidden: torch.Tensor  # [K, H]
    scores: torch.Tensor  # [K] float
    candidates: torch.Tensor  # [K] their places among all
    seen: torch.Tensor  # [K, rows] bool: cache rows that each sees


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(at_least_float(x))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def at_least_float(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, D], halves as pairs; cos, sin [rows, D / 2]."""
    low, high = x.to(at_least_float(x)).chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], dim=-1).to(x.dtype)


def best(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the largest, their indices), largest first."""
    return tuple(values.topk(count))


def layer(
    shape: HeadShape, w: Dense, caches: Caches, tokens: torch.Tensor, hidden: torch.Tensor,
    positions: torch.Tensor, at: torch.Tensor, seen: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """tokens [m], hidden [m, H] -> g [m, H]; keys and values go to the cache rows `at`."""
    m, dim, kv_heads, group = len(tokens), shape.head_dim, shape.kv_heads, shape.heads // shape.kv_heads
    embedded = w.embedding[tokens]
    if shape.kind == "eagle3":
        residual, x = hidden, torch.cat([norm(embedded, w.input_norm), norm(hidden, w.hidden_norm)], dim=1)
    else:
        residual = x = linear(torch.cat([embedded, hidden], dim=1), w.fc)
    q, k, v = linear(x, w.qkv).view(m, -1, dim).split([shape.heads, kv_heads, kv_heads], dim=1)
    cos, sin = w.cos[positions], w.sin[positions]
    caches.k.index_copy_(0, at, rotate(k, cos, sin))
    caches.v.index_copy_(0, at, v)
    # Query heads that share a KV head are folded into rows.
    folded = rotate(q, cos, sin).view(m, kv_heads, group, dim).permute(1, 2, 0, 3)
    folded = folded.reshape(1, kv_heads, -1, dim)
    keys, values = (part.transpose(0, 1)[None] for part in caches)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=additive(seen[None], group, x.dtype))
    out = out.view(kv_heads, group, m, dim).permute(2, 0, 1, 3).reshape(m, -1)
    residual = residual + linear(out, w.o)
    gate, up = linear(norm(residual, w.post_norm), w.gate_up).chunk(2, dim=1)
    return residual + linear(silu(gate) * up, w.down)


def children(w: Dense, g: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([m, K] log-probabilities, [m, K] target ids) of the best tokens behind each row."""
    logits = linear(g if w.norm is None else norm(g, w.norm), w.lm_head)
    scores, ids = best(log_softmax(logits.to(at_least_float(logits)), dim=-1), top_k)
    return scores, ids if w.draft_to_target is None else w.draft_to_target[ids]


def extend(
    shape: HeadShape, w: Dense, caches: Caches, features: torch.Tensor, tokens: torch.Tensor,
    places: torch.Tensor, seen: torch.Tensor, own: torch.Tensor, top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, Beam]:  # fmt: skip
    """The accepted path, and level 1: (scores [K], tokens [K], its beam). own [K, rows]: what its beam
    sees."""
    hidden = linear(features, w.fc) if shape.kind == "eagle3" else features
    g = layer(shape, w, caches, tokens, hidden, places, places, seen)[-1:]
    scores, ids = children(w, g, top_k)
    scores, ids = scores[0], ids[0]
    return (
        scores,
        ids,
        Beam(ids, g.expand(top_k, -1).contiguous(), scores, torch.arange(top_k, device=g.device), own),
    )


def grow(
    shape: HeadShape, w: Dense, caches: Caches, beam: Beam, positions: torch.Tensor, at: torch.Tensor,
    own: torch.Tensor, first: torch.Tensor, top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, Beam]:  # fmt: skip
    """The level below the beam: (scores [K K], tokens [K K], its own beam). first: of its candidates among
    all; own [K, rows]: the rows that the next beam will stand at."""
    g = layer(shape, w, caches, beam.tokens, beam.hidden, positions, at, beam.seen)
    scores, ids = children(w, g, top_k)
    scores, ids = (scores + beam.scores[:, None]).flatten(), ids.flatten()
    kept, places = best(scores, top_k)
    rows = places // top_k
    return scores, ids, Beam(ids[places], g[rows], kept, first + places, beam.seen[rows] | own)


class TorchDraft:
    """One request's cycle over a head; calling it repeats the same cycle. features [Nf, F], targets [Nf] of
    the nodes that were verified; path: the accepted ones."""

    def __init__(
        self, shape: HeadShape, weights: Dense, caches: Caches, features: torch.Tensor, targets: torch.Tensor,
        path: torch.Tensor, cycle: Cycle, transform: Callable[[Callable], Callable] = lambda step: step,
    ):  # fmt: skip
        self.fixed, self.cycle = (shape, weights, caches), cycle
        self.features, self.targets, self.path = features, targets.long(), path.long()
        self.extend, self.grow = transform(extend), transform(grow)
        device, top_k = features.device, cycle.top_k
        rows = torch.arange(len(caches.k), device=device)
        self.places = torch.arange(cycle.context, cycle.committed, device=device)
        self.extend_seen = rows[None] <= self.places[:, None]
        beam = torch.arange(cycle.committed, cycle.committed + top_k, device=device)
        self.at = [beam + i * top_k for i in range(cycle.levels)]
        self.positions = [torch.full_like(at, cycle.committed + i) for i, at in enumerate(self.at)]
        self.own = [rows[None] == at[:, None] for at in self.at]  # the last one: of rows that are not there
        self.first_seen = self.own[0] | (rows[None] < cycle.committed)
        self.first = [torch.tensor(top_k + i * top_k**2, device=device) for i in range(cycle.levels)]

    def __call__(self) -> Tree:
        cycle, top_k = self.cycle, self.cycle.top_k
        scores, tokens, beam = self.extend(
            *self.fixed, self.features[self.path], self.targets[self.path], self.places, self.extend_seen,
            self.first_seen, top_k,
        )  # fmt: skip
        found = [(scores, tokens, torch.full_like(tokens, -1))]
        for i in range(cycle.levels - 1):
            parents = beam.candidates.repeat_interleave(top_k)
            scores, tokens, beam = self.grow(
                *self.fixed, beam, self.positions[i], self.at[i], self.own[i + 1], self.first[i], top_k
            )
            found.append((scores, tokens, parents))
        scores, tokens, parents = (torch.cat(parts) for parts in zip(*found))
        kept = best(scores, min(cycle.nodes - 1, len(scores)))[1].sort().values
        parents = parents[kept]
        slots = torch.where(parents < 0, 0, torch.searchsorted(kept, parents) + 1)
        return Tree(tokens[kept], slots, scores[kept])
