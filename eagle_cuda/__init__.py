"""EAGLE speculative-decoding kernels: one typed function per op, tensors of any DLPack framework."""

from __future__ import annotations

from typing import Any

from eagle_cuda._extension import _C


def build_info() -> dict[str, Any]:
    """What is in this build: version, compiler, CUDA backend or not, CPU instruction set, threads."""
    return _C.build_info()


def num_threads() -> int:
    """Threads that a CPU op may use. Results never depend on it."""
    return _C.num_threads()


def set_num_threads(n: int) -> None:
    """Sets the threads of the CPU backend: 1 to 256; default EAGLE_NUM_THREADS, else the process's cores."""
    _C.set_num_threads(n)
