"""Outputs for `out=None`: numpy arrays for numpy inputs, else torch tensors on the inputs' device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float16: np.float16}


def empty(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """An uninitialised tensor of `shape` and `dtype` in the framework and on the device of `like`."""
    if isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=dtype, device=like.device)
    if isinstance(like, np.ndarray):
        if dtype not in _NUMPY:
            raise ValueError(f"out: numpy has no {dtype}; pass a torch tensor as out=")
        return np.empty(shape, dtype=_NUMPY[dtype])
    raise ValueError(f"out: expected a tensor for inputs of type {type(like).__name__}, got None")
