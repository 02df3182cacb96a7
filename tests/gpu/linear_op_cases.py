"""The cases of linear's ops for op_cases.py, of its Make: arrays and the call."""

from __future__ import annotations

from typing import Any

import torch

from eagle_cuda.linear import TopK, linear, lm_head_topk, pack_weight, rms_norm, unpack_weight

Arrays = dict[str, torch.Tensor]
ROWS, BEST = 4, 5


def arrays_of_weight(make: Any) -> Arrays:
    return {
        "weight": make.normal(40, 70).bfloat16(),
        "out": make.garbage(40, 35).view(torch.bfloat16),
    }


def call_weight(a: Arrays) -> None:
    """Each backend has its own layout: there and back."""
    unpack_weight(pack_weight(a["weight"]), out=a["out"])


def arrays_of_linear(make: Any) -> Arrays:
    """Small integers: every sum is exact, so that the order of the sums does not show."""
    return {
        "x": make.integers(-4, 5, ROWS, 600).bfloat16(),
        "weight": make.integers(-3, 4, 40, 600).bfloat16(),
        "bias": make.integers(-9, 9, 40).bfloat16(),
        "residual": make.normal(ROWS, 40),
        "out": make.garbage(ROWS, 40).view(torch.float32),
    }


def call_linear(a: Arrays) -> None:
    linear(a["x"], pack_weight(a["weight"]), bias=a["bias"], residual=a["residual"], out=a["out"])


def arrays_of_rms_norm(make: Any) -> Arrays:
    return {
        "x": make.normal(ROWS, 200).bfloat16(),
        "weight": make.normal(200).bfloat16(),
        "out": make.garbage(ROWS, 100).view(torch.bfloat16),
    }


def call_rms_norm(a: Arrays) -> None:
    rms_norm(a["x"], a["weight"], out=a["out"])


def arrays_of_lm_head_topk(make: Any) -> Arrays:
    """Logits of 0, -200, -400 ...: sums of exponentials are whole numbers, in any order."""
    return {
        "x": make.integers(1, 4, ROWS, 1).bfloat16(),
        "weight": (make.integers(-5, 1, 1031, 1) * 200).bfloat16(),
        "draft_to_target": make.integers(0, 9 * 1031, 1031),
        "tokens": make.garbage(ROWS, BEST),
        "log_probs": make.garbage(ROWS, BEST).view(torch.float32),
        "lse": make.garbage(ROWS).view(torch.float32),
    }


def call_lm_head_topk(a: Arrays) -> None:
    out = TopK(a["tokens"], a["log_probs"], a["lse"])
    lm_head_topk(a["x"], pack_weight(a["weight"]), BEST, draft_to_target=a["draft_to_target"], out=out)


CASES = {
    "pack_weight": (arrays_of_weight, call_weight),
    "unpack_weight": (arrays_of_weight, call_weight),
    "linear": (arrays_of_linear, call_linear),
    "rms_norm": (arrays_of_rms_norm, call_rms_norm),
    "lm_head_topk": (arrays_of_lm_head_topk, call_lm_head_topk),
}
