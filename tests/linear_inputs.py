"""Inputs that the tests of linear share."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
QUANTIZED = ["fp8", "int8", "int4", "int8_dynamic"]
INF, NAN = float("inf"), float("nan")


def normal(*shape, dtype=torch.float32, seed=0, scale=1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def case(m, n, k, dtype, seed=0):
    """x [M, K] and weight [N, K] whose products have a variance of about one."""
    return normal(m, k, dtype=dtype, seed=seed), normal(n, k, dtype=dtype, seed=seed + 1, scale=k**-0.5)


def guarded(m, n, dtype, extra=5):
    """A strided [M, N] view into a buffer of sentinels, and a check that only the view was written."""
    buffer = torch.full((m + 2, n + extra), 77.0, dtype=dtype)
    view = buffer[1 : m + 1, 2 : n + 2]

    def check():
        outside = torch.ones_like(buffer, dtype=torch.bool)
        outside[1 : m + 1, 2 : n + 2] = False
        assert bool((buffer[outside] == 77.0).all()), "written outside the output"

    return view, check


def head_case(m, vocab, dtype, *, coupled, mapped, seed=0):
    x, weight = case(m, vocab, 24, dtype, seed)
    weight = (weight.float() * 3).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    options = {}
    if mapped:
        options["draft_to_target"] = (
            torch.randperm(3 * vocab, generator=generator)[:vocab].sort().values.int()
        )
    if coupled:
        options["temperature"] = torch.tensor([(0.7, 1.0, 0.0, 1.5)[i % 4] for i in range(m)])
        options["seeds"] = torch.tensor([(-3, 5, 2**63 - 1)[i % 3] for i in range(m)])
        options["positions"] = torch.tensor([100 + i // 2 for i in range(m)], dtype=torch.int32)
    return x, weight, options
