"""Output tensors between sentinel words, so that a write outside the output fails the test even when the
output is right."""

from __future__ import annotations

import torch

_GUARD = 64
_SENTINEL = 0x5A5A5A5A


class Guards:
    """Hands out contiguous int32 or float32 tensors filled with garbage; `check()` finds overruns on both
    sides."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def new(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        size = 1
        for n in shape:
            size *= n
        words = torch.full((size + 2 * _GUARD,), _SENTINEL, dtype=torch.int32)
        self._buffers.append(words)
        return words[_GUARD : _GUARD + size].view(dtype).view(shape)

    def check(self) -> None:
        for words in self._buffers:
            assert bool((words[:_GUARD] == _SENTINEL).all()), "written before the output"
            assert bool((words[-_GUARD:] == _SENTINEL).all()), "written behind the output"
