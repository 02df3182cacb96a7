"""Sampling in fp64, written from docs/bit_exactness.md and docs/sampling.md, with exact Philox bits."""

from __future__ import annotations

import numpy as np

M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK, key >> 32 & MASK
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0, c1, c2, c3


def random_bits(seed: int, position: int, vocab: int) -> np.ndarray:
    """`philox` over all groups of four tokens at once."""
    c0 = np.arange((vocab + 3) // 4, dtype=np.uint64)
    c1, c2, c3 = np.full_like(c0, position & MASK), np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seed & MASK, seed >> 32 & MASK
    low, half = np.uint64(MASK), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(M0) * c0, np.uint64(M1) * c2
        c0, c1, c2, c3 = (
            (p1 >> half) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> half) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return np.stack([c0, c1, c2, c3], 1).reshape(-1)[:vocab].astype(np.uint32)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Of 32 random bits r, in fp32: one rounding of r, one of the sum."""
    v = (bits.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(np.float32)
    return np.minimum(v, np.float32(1 - 2.0**-24))


def gumbel(seed: int, position: int, vocab: int) -> np.ndarray:
    return -np.log(-np.log1p(-uniform(random_bits(seed, position, vocab)).astype(np.float64)))


def support(z: np.ndarray, *, top_k=0, top_p=1.0, min_p=0.0, rule="sequential") -> tuple[np.ndarray, float]:
    """Tokens that stay, and how close (in probability) the nearest top-p or min-p boundary was."""
    vocab, margin = len(z), np.inf
    order = np.lexsort((np.arange(vocab), -z))
    w = np.exp(z - z.max())
    keep = np.ones(vocab, bool)
    limited = 0 < top_k < vocab
    if limited:
        keep[order[top_k:]] = False
    if top_p < 1:
        among = order[:top_k] if limited and rule == "sequential" else order
        target = max(top_p, 0.0) * w[among].sum()
        before = np.concatenate([[0.0], np.cumsum(w[among])[:-1]])
        if len(among) > 1:
            margin = float(np.abs(before[1:] - target).min() / w.sum())
        out = before >= target
        out[0] = False
        keep[among[out]] = False
    if min_p > 0:
        limit = min(min_p, 1.0)
        inexact = w[(w != 1.0)]
        if len(inexact):
            margin = min(margin, float(np.abs(inexact - limit).min()))
        keep &= w >= limit
    return keep, margin


def sample(logits, *, temperature, seed, position, top_k=0, top_p=1.0, min_p=0.0, rule="sequential"):
    """One row. Returns (token, flag, margin): how far the runner-up and the boundaries were; a small margin
    excuses."""
    x = np.where(np.isnan(logits.astype(np.float64)), -np.inf, logits.astype(np.float64))
    if x.max() == -np.inf:
        return 0, 1, np.inf
    if not temperature >= np.float32(1e-5):
        return int(np.argmax(x)), 0, np.inf
    if x.max() == np.inf:
        return int(np.argmax(x)), 0, np.inf
    with np.errstate(over="ignore"):
        z = (x.astype(np.float32) / np.float32(temperature)).astype(
            np.float64
        )  # one IEEE division, as specified
    keep, margin = support(z, top_k=int(top_k), top_p=float(top_p), min_p=float(min_p), rule=rule)
    score = np.where(keep, z + gumbel(seed, position, len(z)), -np.inf)
    token = int(np.argmax(score))
    runner_up = np.delete(score, token)
    if len(runner_up):
        scale = max(1.0, abs(score[token]))
        margin = min(margin, (score[token] - runner_up.max()) / scale)
    return token, 0, margin


def log_softmax_at(logits, token: int) -> float:
    x = np.where(np.isnan(logits.astype(np.float64)), -np.inf, logits.astype(np.float64))
    if not np.isfinite(x.max()):
        return -np.inf
    return float(x[token] - x.max() - np.log(np.exp(x - x.max()).sum()))


# ---- the state: what a request's constraints and its tokens so far do to its logits ------------------------


def output_at(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    """Tokens of the node and of its ancestors below the root; a bad parent ends the walk."""
    found = []
    while node > 0:
        found.append(tokens[node])
        if not 0 <= parents[node] < node:
            break
        node = parents[node]
    return found


def allowed_tokens(vocab, *, mask=None, stop_tokens=(), early=False) -> list[int]:
    """`mask`: words of 32 bits."""
    words = None if mask is None else [int(word) & MASK for word in mask]
    return [
        token
        for token in range(vocab)
        if (words is None or words[token // 32] >> token % 32 & 1)
        and not (early and token in [int(stop) for stop in stop_tokens])
    ]


def adjust(
    logits, *, prompt=(), output=(), repetition=1.0, frequency=0.0, presence=0.0, bias=(), allowed=None
) -> np.ndarray:
    """Logits [V] of one row as float32. `prompt`, `output`, `allowed`: tokens; `bias`: pairs.

    One fp32 rounding per operation, as the order of operations is part of the contract."""
    f = np.float32
    prompt, output = list(prompt), list(output)
    result = []
    with np.errstate(all="ignore"):
        for token, logit in enumerate(logits):
            x = f(logit)
            for other, value in bias:
                if other == token:
                    x = f(x + f(value))
            if token in prompt or token in output:
                x = f(x / f(repetition)) if x > 0 else f(x * f(repetition))
            count = output.count(token)
            if count:
                x = f(x - f(f(frequency) * f(count)))
                x = f(x - f(presence))
            if np.isnan(x) or (allowed is not None and token not in allowed):
                x = f(-np.inf)
            result.append(x)
    return np.array(result, np.float32)


def top(logits, n: int) -> tuple[list[int], list[float]]:
    """The n largest logits, ties to the lower id, and their log_softmax."""
    x = np.where(np.isnan(logits.astype(np.float64)), -np.inf, logits.astype(np.float64))
    order = np.lexsort((np.arange(len(x)), -x))[:n]
    return order.tolist(), [log_softmax_at(logits, int(token)) for token in order]
