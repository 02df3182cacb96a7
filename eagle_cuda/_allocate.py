"""Outputs for `out=None`: numpy arrays for numpy inputs, else torch tensors on the inputs' device.

Their shapes come from inputs, which are checked as far as that needs. And workspaces on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float16: np.float16}


def shape_of(name: str, tensor: Any, rank: int) -> tuple[int, ...]:
    """The shape of the input `name`, which must have `rank` dimensions: raises as the ops themselves do."""
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if len(shape) != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, got {len(shape)} (shape {list(shape)})")
    return tuple(shape)


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A count or size that an argument gives: an integer from `least` to `most`."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    number = value.__index__() if whole else None
    if number is None or number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {value!r}")
    return number


def empty(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """An uninitialised tensor of `shape` and `dtype` in the framework and on the device of `like`."""
    if isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=dtype, device=like.device)
    if isinstance(like, np.ndarray):
        if dtype not in _NUMPY:
            raise ValueError(f"out: numpy has no {dtype}; pass a torch tensor as out=")
        return np.empty(shape, dtype=_NUMPY[dtype])
    raise ValueError(f"out: expected a tensor for inputs of type {type(like).__name__}, got None")


class Workspaces:
    """An op's workspaces on GPUs, one a stream, kept from call to call: calls on a stream take turns."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of(self, like: torch.Tensor, size: int) -> torch.Tensor:
        """At least `size` bytes for the current stream of `like`'s device."""
        key = (like.device, torch.cuda.current_stream(like.device).cuda_stream)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            kept = self._kept[key] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return kept
