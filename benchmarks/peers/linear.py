"""What linear and lm_head_topk are compared with: torch's products of bf16 weights, eager and compiled, and
of fp8 and int8 codes on both sides.

Activations that a peer wants as codes are quantised beforehand, which costs it nothing here. The benchmark
captures every variant in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu_arms import Variant, Variants
from linear_cases import TOP_K, Case
from torch.nn.functional import linear, log_softmax

COMPILE = {"dynamic": False, "fullgraph": True, "mode": "max-autotune-no-cudagraphs"}


class Inputs(NamedTuple):
    case: Case
    x: torch.Tensor  # [M, K] bf16
    dense: list[torch.Tensor]  # [N, K] bf16, one a tensor set


def swiglu(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return swiglu(linear(x, weight))


def best(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return log_softmax(linear(x, weight).float(), dim=1).topk(TOP_K).values


def function(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if case.op == "lm_head_topk":
        return best
    return gated if case.shape.paired else product


def eager(inputs: Inputs) -> Variants:
    apply = function(inputs.case)
    return {"bf16": lambda: Variant(lambda i: apply(inputs.x, inputs.dense[i]))}


def compiled(inputs: Inputs) -> Variants:
    """Autotuned for the shape; Triton's products among the candidates."""

    def variant() -> Variant:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
        apply = torch.compile(function(inputs.case), **COMPILE)
        return Variant(lambda i: apply(inputs.x, inputs.dense[i]))

    return {"bf16": variant}


def by_rows(matrix: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """([R, C] float32 codes up to `largest`, [R, 1] scales)."""
    scale = matrix.float().abs().amax(1, keepdim=True) / largest
    return matrix.float() / scale, scale


def codes(inputs: Inputs) -> Variants:
    """fp8 with scales by row within the product; int8 with scales behind it."""
    finish = swiglu if inputs.case.shape.paired else (lambda y: y)

    def fp8() -> Variant:
        x, x_scale = by_rows(inputs.x, 448)
        x = x.to(torch.float8_e4m3fn)
        pairs = [by_rows(w, 448) for w in inputs.dense]
        sets = [(w.to(torch.float8_e4m3fn).t(), scale.t()) for w, scale in pairs]

        def call(i: int) -> torch.Tensor:
            w, scale = sets[i]
            y = torch._scaled_mm(x, w, scale_a=x_scale, scale_b=scale, out_dtype=torch.bfloat16)
            return finish(y)

        return Variant(call)

    def int8() -> Variant:
        x, x_scale = by_rows(inputs.x, 127)
        x = x.round().to(torch.int8)
        pairs = [by_rows(w, 127) for w in inputs.dense]
        sets = [(w.round().to(torch.int8).t(), scale.t()) for w, scale in pairs]

        def call(i: int) -> torch.Tensor:
            w, scale = sets[i]
            return finish((torch._int_mm(x, w) * x_scale * scale).bfloat16())

        return Variant(call)

    if inputs.case.op != "linear":
        return {}
    if inputs.case.format == "fp8":
        return {"fp8": fp8}
    # torch has it for more than 16 rows.
    return {"int8": int8} if inputs.case.format == "int8_dynamic" and inputs.case.rows > 16 else {}


PEERS: dict[str, Callable[[Inputs], Variants]] = {
    "cuBLAS": eager,
    "torch.compile": compiled,
    "cuBLAS, codes": codes,
}


def offered(case: Case, compiled: bool) -> list[str]:
    """The peers that have something for a case."""
    names = ["cuBLAS"]
    if compiled:
        names.append("torch.compile")
    if case.op == "linear" and (case.format == "fp8" or (case.format == "int8_dynamic" and case.rows > 16)):
        names.append("cuBLAS, codes")
    return names
