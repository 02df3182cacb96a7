"""linear, naive: fp64 for the truth; plain fp32 loops, rounded once, for what a simple kernel would reach."""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = F64) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight by rows, computed in `dtype`."""
    x, weight = x.to(dtype), weight.to(dtype)
    squares = torch.zeros(x.shape[0], 1, dtype=dtype)
    for k in range(x.shape[1]):
        squares = squares + x[:, k : k + 1] * x[:, k : k + 1]
    return x / torch.sqrt(squares / x.shape[1] + eps) * weight


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    dtype: torch.dtype = F64,
) -> Tensor:
    """residual + activation(x @ weight^T + bias), one product after the other, in `dtype`."""
    x, weight = x.to(dtype), weight.to(dtype)
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=dtype)
    for k in range(x.shape[1]):
        y = y + x[:, k : k + 1] * weight[:, k]
    if bias is not None:
        y = y + bias.to(dtype)
    if swiglu:
        gate, up = y.chunk(2, dim=1)
        y = gate / (1 + torch.exp(-gate)) * up
    return y if residual is None else residual.to(dtype) + y


def topk(
    logits: Tensor,
    k: int,
    *,
    noise: Tensor | None = None,
    temperature: float = 0.0,
    tau: float = 1.0,
) -> tuple[list[int], list[float], float]:
    """(draft ids, log-probabilities, log-sum-exp) of one row of logits [V], by lm_head_topk's contract.

    `noise` [V] is g of every id; without it, or with a temperature below 1e-5, the row is uncoupled.
    """
    scores = logits.to(F64).clone()
    coupled = noise is not None and temperature >= 1e-5
    if coupled:
        scores = scores + temperature * noise.to(F64)
    scores[torch.isnan(scores)] = -torch.inf
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    y = scores / tau if coupled else scores
    top = float(y.max())
    if abs(top) == float("inf"):
        lse = top
    else:
        lse = top + float(torch.log(torch.exp(y - top).sum()))
    log_probs = []
    for i in order[:k]:
        value = float(y[i]) - lse
        log_probs.append(-float("inf") if value != value else min(value, 0.0))
    return order[:k], log_probs, lse
