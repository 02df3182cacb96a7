"""linear on every instruction set that this processor has: right, and bit-equal."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

import eagle_cuda
from compare import assert_close_to_fp64
from eagle_cuda.linear import linear, lm_head_topk, pack_weight, rms_norm, unpack_weight
from linear_inputs import DTYPES, QUANTIZED, case, head_case, normal
from reference import linear as naive


def print_digests() -> None:
    """Prints two digests of this process's bits: of all ops but bf16 products, and of bf16 products.
    int8_dynamic has none: its sums are integers."""
    common, products = hashlib.sha256(), hashlib.sha256()

    def add(digest, *tensors):
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    for dtype in DTYPES:
        for m, n, k in ((1, 100, 75), (7, 70, 33), (12, 40, 130), (20, 64, 64)):
            x, weight = case(m, n, k, dtype)
            gamma, packed = normal(k, dtype=dtype), pack_weight(weight, paired=True)
            normed = rms_norm(x, gamma)
            got = linear(x, packed, rms_norm=gamma, activation="swiglu", out_dtype=torch.float32)
            naive32 = naive.linear(normed, weight, swiglu=True, dtype=torch.float32)
            assert_close_to_fp64(got, naive.linear(normed, weight, swiglu=True), naive32)
            add(common, normed)
            add(products if dtype == torch.bfloat16 else common, got)
            for format in QUANTIZED:
                digest = products if dtype == torch.bfloat16 and format != "int8_dynamic" else common
                packed = pack_weight(weight, format)
                add(digest, unpack_weight(packed), linear(x, packed, rms_norm=gamma))
            x, weight, options = head_case(m, 1500, dtype, coupled=True, mapped=bool(m % 2))
            add(
                products if dtype == torch.bfloat16 else common,
                *lm_head_topk(x, pack_weight(weight), 5, **options),
            )
            for format in QUANTIZED:
                digest = products if dtype == torch.bfloat16 and format != "int8_dynamic" else common
                add(digest, *lm_head_topk(x, pack_weight(weight, format), 5, **options))
    print(eagle_cuda.build_info()["cpu_isa"], common.hexdigest(), products.hexdigest())


def digests_on(isa: str) -> list[str]:
    env = {**os.environ, "EAGLE_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "import test_linear_sets; test_linear_sets.print_digests()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, *digests = done.stdout.split()
    assert name == isa
    return digests


def agree(sets: list[str]) -> None:
    """Each set is right (print_digests checks), and all give the same bits; but AVX-512 BF16 rounds bf16
    products its own way."""
    got = {isa: digests_on(isa) for isa in sets}
    plain = [isa for isa in sets if isa != "avx512_bf16"]
    assert len({common for common, _ in got.values()}) == 1, got
    assert len({got[isa][1] for isa in plain}) <= 1, got


def available() -> list[str]:
    sets = ["generic", "avx2", "avx512", "avx512_bf16"]
    return sets[: sets.index(eagle_cuda.build_info()["cpu_isa"]) + 1]


def test_oldest_and_newest_set_agree():
    agree([available()[0], available()[-1]])


@pytest.mark.full
def test_all_sets_agree():
    agree(available())
