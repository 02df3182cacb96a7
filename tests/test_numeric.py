"""common/numeric.h and common/philox.h: error bounds against fp64, known answers, the same bits at every
vector
width."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FLAGS = {
    "generic": ["-O2"],
    "avx2": ["-O3", "-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-O3",
        *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")),
        *("-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ],
}
# Largest error in ulp over all floats, as the comments of numeric.h state it.
BOUNDS = {
    "exp": 1.1,
    "log": 1.0,
    "log1p": 1.5,
    "rsqrt": 1.5,
    "tanh": 1.6,
    "sigmoid": 2.6,
    "silu": 2.6,
    "sigmoid_tail": 0,
    "silu_tail": 0,
}
STRIDE = 4093  # every 4093rd float, and every float around the special values


def supported() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    names = ["generic"]
    if " avx2 " in flags and " fma " in flags:
        names.append("avx2")
    if all(f" {f} " in flags for f in ("avx512f", "avx512bw", "avx512dq", "avx512vl")):
        names.append("avx512")
    return names


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("numeric")
    common = [
        "-std=c++20",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        f"-I{ROOT / 'csrc'}",
    ]
    built = {}
    for name in supported():
        built[name] = folder / name
        command = [
            compiler,
            *common,
            *FLAGS[name],
            "-o",
            str(built[name]),
            str(ROOT / "tests/cpp/numeric_check.cpp"),
        ]
        subprocess.run(command, check=True)
    return built


def measure(program: Path, stride: int) -> dict[str, tuple[float, str, str]]:
    lines = subprocess.run(
        [program, str(stride)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {name: (float(worst), at, checksum) for name, worst, at, checksum in map(str.split, lines)}


@pytest.fixture(scope="module")
def measured(programs):
    return {name: measure(program, STRIDE) for name, program in programs.items()}


@pytest.mark.parametrize("function", BOUNDS)
def test_error_bound(measured, function):
    for isa, results in measured.items():
        worst, at, _ = results[function]
        assert worst <= BOUNDS[function], f"{function} on {isa}: {worst} ulp at 0x{at}"


def test_exp_keeps_the_order(programs):
    """Masses fall with the logits: sample_tokens bounds the mass of a range of logits by that of its ends."""
    program = list(programs.values())[-1]  # all have the same bits; this one is fast
    assert subprocess.run([program, "1", "order"], check=True, capture_output=True).stdout == b"0\n"


def test_same_bits_for_every_instruction_set(measured):
    reference = measured["generic"]
    for isa, results in measured.items():
        assert results == reference, isa


def test_gumbel_is_finite_and_bounded(measured):
    worst, at, _ = measured["generic"]["gumbel"]
    assert worst <= 1.5e-6, f"r = 0x{at}"
    assert 22.87 < measured["generic"]["gumbel_range"][0] < 22.9  # kMaxGumbel
    assert -2.82 < measured["generic"]["gumbel_min"][0] < -2.81


def test_philox_known_answer(measured):
    assert measured["generic"]["philox"][2] == "6627e8d5e169c58dbc57ac4c9b00dbd8"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_conversions_match_torch_and_numpy(programs, kind):
    """All 65536 halves to float; floats to half, rounded to nearest even, NaN kept."""
    stride = 4099
    for program in programs.values():
        raw = subprocess.run([program, str(stride), kind], check=True, capture_output=True).stdout
        to_float = np.frombuffer(raw, np.float32, 65536)
        from_float = np.frombuffer(raw, np.uint16, offset=65536 * 4)
        halves = np.arange(65536, dtype=np.uint16)
        floats = np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32).view(np.float32)
        if kind == "fp16":
            with np.errstate(over="ignore", invalid="ignore"):
                expected_float = halves.view(np.float16).astype(np.float32)
                expected_half = floats.astype(np.float16).view(np.uint16)
                is_nan = np.isnan(from_float.view(np.float16))
        else:
            expected_float = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy()
            rounded = torch.from_numpy(floats).bfloat16()
            expected_half = rounded.view(torch.int16).numpy().view(np.uint16)
            is_nan = np.isnan(
                torch.from_numpy(from_float.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
            )
        nan = np.isnan(expected_float)
        assert (np.isnan(to_float) == nan).all()
        assert (to_float.view(np.uint32)[~nan] == expected_float.view(np.uint32)[~nan]).all()
        nan = np.isnan(floats)
        assert (is_nan == nan).all()
        assert (from_float[~nan] == expected_half[~nan]).all()


def test_e4m3_matches_torch(programs):
    """All 256 codes to float; floats to codes, rounded to nearest even, at most 448; the same on every
    instruction set. torch's conversion overflows to NaN, so that beyond 448 it has no say."""
    stride = 1021
    floats = np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32).view(np.float32)
    clamped = torch.from_numpy(floats).clamp(-448.0, 448.0)  # NaN stays
    want = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    for program in programs.values():
        raw = subprocess.run([program, str(stride), "e4m3"], check=True, capture_output=True).stdout
        to_float, codes = np.frombuffer(raw, np.float32, 256), np.frombuffer(raw, np.uint8, offset=1024)
        nan = np.isnan(values)
        assert (np.isnan(to_float) == nan).all()
        assert (to_float.view(np.uint32)[~nan] == values.view(np.uint32)[~nan]).all()
        nan = np.isnan(floats)
        assert ((codes & 0x7F == 0x7F) == nan).all()
        assert (codes[~nan] == want[~nan]).all()


@pytest.mark.full
def test_error_bounds_dense(programs):
    """As above with twenty times as many floats."""
    program = programs[supported()[-1]]
    results = measure(program, 199)
    for function, bound in BOUNDS.items():
        assert results[function][0] <= bound, (function, results[function])
    assert results["gumbel"][0] <= 1.5e-6
