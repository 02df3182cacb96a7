"""Every wrong argument of linear's ops raises ValueError: which, what was expected, what was given."""

from __future__ import annotations

import pytest
import torch

from eagle_cuda.linear import PackedWeight, TopK, linear, lm_head_topk, pack_weight, rms_norm, unpack_weight
from linear_inputs import NAN

X, W = torch.zeros(2, 6), pack_weight(torch.zeros(4, 6))
PAIRED = pack_weight(torch.zeros(4, 6), paired=True)
HEAD = {
    "temperature": torch.ones(2),
    "seeds": torch.zeros(2, dtype=torch.int64),
    "positions": torch.zeros(2).int(),
}
ERRORS = {
    "x: expected dtype float32, got bfloat16": lambda: linear(X.bfloat16(), W),
    "x: expected shape [-1, 6], got [2, 5]": lambda: linear(X[:, :5], W),
    "x: expected shape [-1, 6], got [2]": lambda: linear(torch.zeros(2), W, out=torch.zeros(2, 4)),
    "x: expected the last dimension to be contiguous": lambda: linear(torch.zeros(6, 2).t(), W),
    "out: expected shape [2, 4], got [2, 3]": lambda: linear(X, W, out=torch.zeros(2, 3)),
    "out: expected shape [2, 2], got [2, 4]": lambda: linear(
        X, PAIRED, activation="swiglu", out=torch.zeros(2, 4)
    ),
    "out: expected a dtype of float32, bfloat16, float16, got int32": lambda: linear(
        X, W, out=torch.zeros(2, 4).int()
    ),
    "out: expected an output without overlapping elements": lambda: linear(
        X, W, out=torch.zeros(1, 4).expand(2, 4)
    ),
    "out_dtype: expected None": lambda: linear(X, W, out=torch.zeros(2, 4), out_dtype=torch.float32),
    "activation: expected None or": lambda: linear(X, W, activation="gelu"),
    "activation: expected a weight packed with paired=True": lambda: linear(X, W, activation="swiglu"),
    "rms_norm: expected shape [6], got [5]": lambda: linear(X, W, rms_norm=torch.zeros(5)),
    "rms_norm: expected dtype float32, got float16": lambda: linear(X, W, rms_norm=torch.zeros(6).half()),
    "eps: expected a number >= 0, got -1": lambda: linear(X, W, rms_norm=torch.zeros(6), eps=-1.0),
    "bias: expected shape [4], got [6]": lambda: linear(X, W, bias=torch.zeros(6)),
    "bias: expected a contiguous tensor": lambda: linear(X, W, bias=torch.zeros(8)[::2]),
    "residual: expected dtype float32, got float16": lambda: linear(X, W, residual=torch.zeros(2, 4).half()),
    "residual: expected shape [2, 4], got [1, 4]": lambda: linear(X, W, residual=torch.zeros(1, 4)),
    "weight: expected dtype float32, got float16": lambda: rms_norm(X, torch.zeros(6).half()),
    "weight: expected shape [6], got [4]": lambda: rms_norm(X, torch.zeros(4)),
    "x: expected a dtype of float32, bfloat16, float16, got int32": lambda: rms_norm(X.int(), torch.zeros(6)),
    "out: expected shape [2, 6], got [3, 6]": lambda: rms_norm(X, torch.zeros(6), out=torch.zeros(3, 6)),
    "k: expected 1 to 4, got 5": lambda: lm_head_topk(X, W, 5),
    "k: expected 1 to 4, got 0": lambda: lm_head_topk(X, W, 0),
    "k: expected 1 to 32, got 33": lambda: lm_head_topk(X, pack_weight(torch.zeros(40, 6)), 33),
    "weight: expected a weight packed with paired=False": lambda: lm_head_topk(X, PAIRED, 1),
    "tau: expected a finite number > 0, got 0": lambda: lm_head_topk(X, W, 1, tau=0.0, **HEAD),
    "tau: expected a finite number > 0, got nan": lambda: lm_head_topk(X, W, 1, tau=NAN),
    "draft_to_target: expected dtype int32, got int64": lambda: lm_head_topk(
        X, W, 1, draft_to_target=torch.arange(4)
    ),
    "draft_to_target: expected shape [4], got [5]": lambda: lm_head_topk(
        X, W, 1, draft_to_target=torch.arange(5).int()
    ),
    "temperature: expected shape [2], got [1]": lambda: lm_head_topk(
        X, W, 1, **{**HEAD, "temperature": torch.ones(1)}
    ),
    "seeds: expected a tensor, got None": lambda: lm_head_topk(X, W, 1, **{**HEAD, "seeds": None}),
    "positions: expected dtype int32, got int64": lambda: lm_head_topk(
        X, W, 1, **{**HEAD, "positions": HEAD["seeds"]}
    ),
    "log_probs: expected shape [2, 2], got [2, 1]": lambda: lm_head_topk(
        X, W, 2, out=TopK(torch.zeros(2, 2).int(), torch.zeros(2, 1), None)
    ),
    "weights: expected 2 dimensions, got 1": lambda: pack_weight(torch.zeros(4)),
    "weights: expected a dtype of float32, bfloat16, float16, got torch.int32": lambda: pack_weight(
        torch.zeros(4, 4).int()
    ),
    "weights: expected 6 columns, got 5": lambda: pack_weight([torch.zeros(4, 6), torch.zeros(4, 5)]),
    "weights: expected at least one matrix": lambda: pack_weight([]),
    "weights: expected as many gate as up rows, got 3": lambda: pack_weight(torch.zeros(3, 4), paired=True),
    "weights: expected N >= 0 and K >= 1": lambda: pack_weight(torch.zeros(3, 0)),
    "format: expected one of bf16, fp16, fp32, fp8, int8, int4, int8_dynamic, got int9": lambda: pack_weight(
        torch.zeros(3, 4), "int9"
    ),
    "out: expected dtype float32, got float16": lambda: unpack_weight(W, out=torch.zeros(4, 6).half()),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert str(error.value).startswith(message)


def test_a_weight_is_an_object():
    assert isinstance(W, PackedWeight)
    assert repr(W) == "PackedWeight(n=4, k=6, format='fp32', paired=False, backend='cpu')"
    with pytest.raises(TypeError):
        linear(X, torch.zeros(4, 6), out=torch.zeros(2, 4))
