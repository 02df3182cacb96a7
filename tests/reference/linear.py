"""linear, naive: fp64 for the truth; plain fp32 loops, rounded once, for what a simple kernel would reach."""

from __future__ import annotations

import numpy as np
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


# The sizes that fp8 (E4M3) has, by their codes.
FP8 = np.array(
    [m / 512 for m in range(8)] + [(8 + m) / 8 * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
)


def quantize(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(codes [N, K], the scale of each [N, K]) of a matrix, both fp64: the value of an element is their
    product. Scale by scale, as CONTRACTS words it."""
    groups = 64 if format == "int4" else weight.shape[1]
    limit = np.float32({"fp8": 448, "int8": 127, "int8_dynamic": 127, "int4": 7}[format])
    codes, scales = np.zeros(weight.shape), np.zeros(weight.shape)
    for n, row in enumerate(weight.float().numpy()):
        for begin in range(0, len(row), groups):
            group = row[begin : begin + groups]
            scale = np.abs(group).max() / limit
            if format == "int4":
                scale = min(scale, np.float32(65504)).astype(np.float16).astype(np.float32)
            scales[n, begin : begin + groups] = scale
            if scale == 0:
                continue
            exact = np.clip(group / scale, -limit, limit).astype(np.float64)
            if format == "fp8":  # the nearest; of two, the one whose mantissa is even
                distance = np.abs(np.abs(exact)[:, None] - FP8)
                nearest = distance == distance.min(1, keepdims=True)
                even = nearest & (np.arange(len(FP8)) % 2 == 0)
                code = np.where(even.any(1), even.argmax(1), nearest.argmax(1))
                codes[n, begin : begin + groups] = np.copysign(FP8[code], exact)
            else:
                codes[n, begin : begin + groups] = np.rint(exact) + 0.0  # an integer has no -0
    return torch.from_numpy(codes), torch.from_numpy(scales)


def dequantize(weight: Tensor, format: str) -> Tensor:
    """What a matrix is worth in `format`, float32."""
    codes, scales = quantize(weight, format)
    return (codes * scales).float()


def int8_dynamic(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T with both sides quantised by row: exact sums, then two float32 products."""
    (a, a_scales), (b, b_scales) = quantize(x, "int8"), quantize(weight, "int8")
    return (a @ b.T).float() * a_scales[:, :1].float() * b_scales[:, 0].float()


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
