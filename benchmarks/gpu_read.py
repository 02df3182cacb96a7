"""A kernel that reads memory and does next to nothing with it; needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _xor_kernel(words, out, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    start = program.to(tl.int64) * SHARE
    total = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, SHARE, BLOCK):
        total ^= tl.load(words + start + at + tl.arange(0, BLOCK))
    tl.store(out + program, tl.xor_sum(total, axis=0))


def xor_words(words: torch.Tensor, programs: int, block: int, out: torch.Tensor) -> None:
    """out [programs] int32: the exclusive or of each program's share of `words`, an int32 vector whose length
    is a multiple of programs * block."""
    _xor_kernel[(programs,)](words, out, SHARE=words.numel() // programs, BLOCK=block, num_warps=8)
