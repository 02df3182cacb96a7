"""linear: weights packed once, then skinny matrix products whose rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_cuda import _allocate, _huge_pages
from eagle_cuda._extension import _C

PackedWeight = _C.PackedWeight

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DTYPES = {name: dtype for dtype, name in _FORMATS.items()}
_LARGEST = float(torch.finfo(torch.float32).max)
# Largest |w| that a quantised format takes: in int4 7 times the largest float16, which its scales are.
_QUANTIZED = {"fp8": _LARGEST, "int8": _LARGEST, "int4": 7.0 * 65504, "int8_dynamic": _LARGEST}


class TopK(NamedTuple):
    """What `lm_head_topk` returns; lse may be None in `out=`."""

    tokens: Tensor  # [M, k] int32, target ids, best first
    log_probs: Tensor  # [M, k] float32, at most 0
    lse: Tensor | None  # [M] float32, natural log of the sum of exponentials


def pack_weight(
    weights: Tensor | Sequence[Tensor], format: str | None = None, *, paired: bool = False
) -> PackedWeight:
    """Reorders a matrix once into the layout that `linear` and `lm_head_topk` stream.

    Args:
        weights: ``[N, K]``, or several ``[N_i, K]`` that share an input (q, k, v; gate, up), concatenated by
            rows. float32, bfloat16 or float16.
        format: ``"bf16"``, ``"fp16"`` or ``"fp32"``; converted by torch where it differs. Or a quantised one,
            rounded to nearest even from what is given. Default: the first dtype.

            * ``"fp8"``: e4m3, one float32 scale a row, max |w| / 448.
            * ``"int8"``: one float32 scale a row, max |w| / 127.
            * ``"int4"``: -7 to 7, one float16 scale for each 64 columns of a row, max |w| / 7.
            * ``"int8_dynamic"``: as int8, and the activations are quantised by row in the same way: integer
              sums, the same bits on every backend. At most 131072 columns.
        paired: The first half of the rows is gate, the second half up, for ``activation="swiglu"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; an odd number of rows with ``paired``;
            NaN, infinity, or in int4 more than 458 528, in a matrix to be quantised.
    """
    if isinstance(weights, str) or not hasattr(weights, "__len__"):
        raise TypeError(f"weights: expected tensors, got {type(weights).__name__}")
    if isinstance(weights, (Tensor, np.ndarray)):
        weights = [weights]
    sources = [torch.as_tensor(w) for w in weights]
    if not sources:
        raise ValueError("weights: expected at least one matrix, got none")
    if format is None:
        format = _FORMATS.get(sources[0].dtype)
        if format is None:
            raise ValueError(
                f"weights: expected a dtype of float32, bfloat16, float16, got {sources[0].dtype}"
            )
    if format not in _DTYPES and format not in _QUANTIZED:
        raise ValueError(f"format: expected one of {', '.join((*_DTYPES, *_QUANTIZED))}, got {format}")
    for w in sources:
        if w.ndim != 2:
            raise ValueError(f"weights: expected 2 dimensions, got {w.ndim} (shape {list(w.shape)})")
        if w.shape[1] != sources[0].shape[1]:
            raise ValueError(f"weights: expected {sources[0].shape[1]} columns, got {w.shape[1]}")
        if w.device != sources[0].device:
            raise ValueError(f"weights: expected device {sources[0].device}, got {w.device}")
    n, k = sum(w.shape[0] for w in sources), sources[0].shape[1]
    if paired and n % 2:
        raise ValueError(f"weights: expected as many gate as up rows, got {n} rows together")
    device = sources[0].device
    size = _C.packed_weight_bytes(n, k, format, device.type == "cuda")
    on_cpu = device.type == "cpu"
    data = _huge_pages.empty(size) if on_cpu else torch.empty(size, dtype=torch.uint8, device=device)
    row = 0
    for w in sources:
        w = w.detach()
        if format in _QUANTIZED:
            w = w if w.dtype in _FORMATS else w.float()
            _refuse_beyond(w, format)
        else:
            w = w.to(_DTYPES[format])
        _C.pack_weight(w if w.stride(1) == 1 else w.contiguous(), row, n, k, format, paired, data)
        row += w.shape[0]
    return _C.own_weight(n, k, format, paired, data)


def unpack_weight(weight: PackedWeight, *, out: Tensor | None = None) -> Tensor:
    """The ``[N, K]`` matrix that was packed, rows in source order.

    Bit for bit in the format's dtype; of a quantised format code times scale, in float32.
    """
    _check_weight(weight)
    if out is None:
        dtype = _DTYPES.get(weight.format, torch.float32)
        out = torch.empty((weight.n, weight.k), dtype=dtype, device=weight.data.device)
    _C.unpack_weight(weight, out)
    return out


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    rms_norm: Tensor | None = None,
    eps: float = 1e-5,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """``residual + activation(norm(x) @ W^T + bias)``. Row i is bitwise what a call with row i alone gives.

    Sums are float32, in one order over K for any M and any number of threads; one rounding at the end.
    Quantised weights are multiplied as their codes: fp8 and int8 sums meet the row's scale once, at the end;
    int4 sums of 64 columns meet their group's scale. int8_dynamic sums are integers.

    Args:
        x: ``[M, K]``, dtype of the weight's format, any row stride. float32, bfloat16 or float16 with a
            quantised one. With int8_dynamic a row that holds NaN or infinity gives NaN.
        weight: ``[N, K]``, packed.
        rms_norm: ``[K]``, dtype of x: normalise the rows of x first; the result is rounded to x's dtype.
        eps: Added to the mean square.
        bias: ``[N]``, dtype of x.
        residual: ``[M, N]`` (``[M, N/2]`` with swiglu), dtype of out; may be `out` itself.
        activation: None or ``"swiglu"``: silu(gate) * up of a paired weight, N/2 columns.
        out: ``[M, N]`` or ``[M, N/2]``; allocated when omitted; may be `x`.
        out_dtype: float32, bfloat16 or float16; default x's. Only without `out`.
        workspace: None, or uint8 ``[linear_workspace_bytes]`` on the device of x, used by one call at a time.
            None takes one that is kept for each device and stream and grows as needed: give your own where a
            CUDA graph captures the call, so that its memory lives as long as the graph.

    Raises:
        ValueError: an argument's dtype, shape, layout or device is wrong; the message names it.
    """
    if out is None:
        _check_weight(weight)
        columns = weight.n if activation is None else weight.n // 2
        rows, _ = _allocate.shape_of("x", x, 2)
        out = _allocate.empty(x, (rows, columns), out_dtype or _dtype(x, weight))
    elif out_dtype is not None:
        raise ValueError("out_dtype: expected None when out is given")
    if workspace is None and isinstance(x, Tensor) and x.is_cuda and _fit(x, weight):
        workspace = _workspaces.of(x, _C.linear_workspace_bytes(weight, x.shape[0]))
    _C.linear(x, weight, rms_norm, eps, bias, residual, activation, out, workspace)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` by rows, in float32 with one rounding.

    Bit-equal to the norm that `linear` fuses.

    Args:
        x: ``[M, K]`` float32, bfloat16 or float16, any row stride.
        weight: ``[K]``, dtype of x.
        out: ``[M, K]``, dtype of x; may be `x`.
    """
    if out is None:
        shape = _allocate.shape_of("x", x, 2)
        out = np.empty(shape, x.dtype) if isinstance(x, np.ndarray) else _allocate.empty(x, shape, x.dtype)
    _C.rms_norm(x, weight, eps, out)
    return out


def lm_head_topk(
    x: Tensor,
    weight: PackedWeight,
    k: int,
    *,
    rms_norm: Tensor | None = None,
    eps: float = 1e-5,
    draft_to_target: Tensor | None = None,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    tau: float = 1.0,
    out: TopK | None = None,
    workspace: Tensor | None = None,
) -> TopK:
    """The k best tokens of every row of ``norm(x) @ W^T``, without keeping the logits.

    A row is uncoupled when `temperature` is None or below 1e-5: it ranks by the logit q, and its
    log-probabilities are ``log_softmax(q)``. A coupled row ranks by ``z = q + T * g(seed, position, target
    id)``, the target's own Gumbel noise, with ``log_softmax(z / tau)`` (Gumbel coupling: Daliri et al., arXiv
    2408.07978). Equal scores: the lower id first. NaN counts as -inf; a row with fewer than k usable logits
    is filled up with the lowest unused ids at -inf.

    Args:
        x: ``[M, K]``, of a dtype that `linear` takes for the weight.
        weight: ``[Vd, K]``, packed unpaired.
        k: 1 to 32, at most Vd.
        rms_norm: ``[K]``, dtype of x.
        draft_to_target: ``[Vd]`` int32 absolute target ids; None is the identity.
        temperature: ``[M]`` float32.
        seeds: ``[M]`` int64, with temperature.
        positions: ``[M]`` int32, index of the token to be produced, with temperature.
        tau: Confidence temperature of coupled rows, > 0.
        out: TopK of outputs; its lse may be None.
        workspace: As in `linear`, of `lm_head_topk_workspace_bytes`.
    """
    if out is None:
        m, _ = _allocate.shape_of("x", x, 2)
        _check_weight(weight)
        k = _allocate.integer("k", k, 1, min(32, weight.n))
        out = TopK(
            _allocate.empty(x, (m, k), torch.int32),
            _allocate.empty(x, (m, k), torch.float32),
            _allocate.empty(x, (m,), torch.float32),
        )
    elif (columns := _allocate.shape_of("tokens", out.tokens, 2)[1]) != k:
        raise ValueError(f"tokens: expected {k} columns (k), got {columns}")
    if workspace is None and isinstance(x, Tensor) and x.is_cuda and _fit(x, weight):
        workspace = _workspaces.of(x, _C.lm_head_topk_workspace_bytes(weight, x.shape[0], k))
    options = (draft_to_target, temperature, seeds, positions, tau)
    _C.lm_head_topk(x, weight, rms_norm, eps, *options, *out, workspace)
    return out


def linear_workspace_bytes(weight: PackedWeight, m: int) -> int:
    """Bytes of the workspace of `linear` for `m` rows on the weight's device; 0 on the CPU."""
    _check_weight(weight)
    return _C.linear_workspace_bytes(weight, m)


def lm_head_topk_workspace_bytes(weight: PackedWeight, m: int, k: int) -> int:
    """Bytes of the workspace of `lm_head_topk` for `m` rows on the weight's device; 0 on the CPU."""
    _check_weight(weight)
    return _C.lm_head_topk_workspace_bytes(weight, m, k)


_workspaces = _allocate.Workspaces()


def _fit(x: Tensor, weight: PackedWeight) -> bool:
    """Whether a workspace can be sized for them; if not, the op says what is wrong."""
    return x.ndim == 2 and isinstance(weight, PackedWeight)


def _check_weight(weight: PackedWeight) -> None:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight: expected a PackedWeight, got {type(weight).__name__}")


def _refuse_beyond(w: Tensor, format: str) -> None:
    """NaN, infinity, and what the scales of `format` cannot reach."""
    if w.numel() == 0:
        return
    low, high = (float(value) for value in torch.aminmax(w))
    limit = _QUANTIZED[format]
    if not (low >= -limit and high <= limit):
        wanted = "finite values" if limit == _LARGEST else f"values from {-limit:.0f} to {limit:.0f}"
        raise ValueError(f"weights: expected {wanted} for {format}, got {low} to {high}")


def _dtype(x: Tensor, weight: PackedWeight) -> torch.dtype:
    if isinstance(x, Tensor):
        return x.dtype
    if weight.format in _DTYPES:
        return _DTYPES[weight.format]
    return torch.float16 if getattr(x, "dtype", None) == np.float16 else torch.float32
