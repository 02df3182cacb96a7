"""The wrappers of csrc/cuda/device/ptx*.cuh and what CUDA C++ offers beside them: under the emulator they do
what plain C++ does, and nvcc takes the same file. `make gpu-check` runs it on a GPU and compares the two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, emulator_build
from tools import gpu_check, ptxas_report

GPU = ROOT / "tests/gpu"
KERNELS = sorted(GPU.glob("*_conformance.cu"))


@pytest.fixture(scope="module")
def program() -> Path:
    """ptx_conformance over the emulator."""
    path = emulator_build() / "ptx_conformance"
    if not path.is_file():
        pytest.skip("needs the emulator: make simt")
    return path


def case_names() -> list[str]:
    text = "".join(path.read_text() for path in KERNELS)
    return re.findall(r'^ +(?:mapped<.*>\(|\{)"([^"]+)"', text, re.M)


def test_the_emulator_does_what_plain_cpp_does(program):
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    wrong = [line for line in done.stdout.splitlines() if ": ok, " not in line]
    assert wrong == []
    assert done.returncode == 0, done.stderr
    names = [name for name in case_names() if not name.startswith("planted: ")]
    assert sorted(line.partition(": ok, ")[0] for line in done.stdout.splitlines()) == sorted(names)
    assert len(names) >= 76


def test_every_planted_fault_is_told(program):
    """An instruction whose result depends on the place, a neighbour or the lane: each makes its case fail."""
    done = subprocess.run([program, "planted"], capture_output=True, text=True, timeout=120)
    told = re.findall(f"^({gpu_check.PLANTED})$", done.stdout, re.M)
    names = [name for name in case_names() if name.startswith("planted: ")]
    assert [line.partition(": word ")[0] for line in told] == names
    assert len(names) == 6
    assert done.returncode == 1
    assert gpu_check.planted(gpu_check.Checks(60), program) == "6 planted faults, each told"


TOLD = "planted: row: word 7: expected 00000040, got 0000003f"


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        ([TOLD, "planted: lane: ok, 0123456789abcdef"], 1, "that is told, got: planted: lane: ok, 01234567"),
        ([], 1, "that is told, got: exit status 1, no output"),
        ([TOLD, TOLD], 0, "expected exit status 1, got 0"),
        ([TOLD], 139, "expected exit status 1, got 139"),
    ],
)
def test_a_planted_fault_that_nobody_tells_is_a_failure(lines, status, message, tmp_path):
    script = tmp_path / "program"
    script.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), f"exit {status}\n"]))
    script.chmod(0o755)
    with pytest.raises(gpu_check.Failed, match=re.escape(message)):
        gpu_check.planted(gpu_check.Checks(60), script)


def test_every_wrapper_has_a_case():
    wrappers = set(
        re.findall(
            r"^__device__ __forceinline__ [\w&]+ (\w+)\(",
            "".join(path.read_text() for path in (ROOT / "csrc/cuda/device").glob("ptx*.cuh")),
            re.M,
        )
    )
    assert {"load", "store", "shared_memory", "load_acquire", "load_matrices"} <= wrappers
    wrappers -= {"shared_address"}  # the wrappers' own
    wrappers -= {"arrives_at_grid", "passes_grid", "computed_here"}  # hints without an instruction
    text = "".join((GPU / f"{name}_conformance.cu").read_text() for name in ("ptx", "bulk", "grid", "matrix"))
    used = set(re.findall(r"\b(\w+)(?:<[^;()]*>)?\(", text))
    assert wrappers <= used, f"no case of {sorted(wrappers - used)}"


@pytest.mark.skipif(ptxas_report.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.full)])
def test_nvcc_takes_the_cases(source, arch, tmp_path):
    compiled = ptxas_report.compile_kernels(source, arch, tmp_path)
    assert len(compiled.kernels) >= 3
    assert [kernel for kernel in compiled.functions if kernel.spill_stores or kernel.stack] == []


# ---- tools/gpu_check.py ---------------------------------------------------------------------------------


def test_outcomes_of_checks(capsys):
    checks = gpu_check.Checks(30)
    python = [sys.executable, "-c"]
    checks.check("good", lambda: checks.must([*python, "print('fine')"], 20).strip())
    checks.check("bad", lambda: checks.must([*python, "print('why'); raise SystemExit(3)"], 20))
    checks.check("slow", lambda: checks.must([*python, "import time; time.sleep(60)"], 1.5))
    checks.check("absent", gpu_check.build_target, checks, Path("/nowhere"), "_C")
    assert [(row.check, row.state, row.detail) for row in checks.rows] == [
        ("good", "ok", "fine"),
        ("bad", "FAILED", "why"),
        ("slow", "FAILED", "not done after 2 s"),
        ("absent", "not available", "no build folder"),
    ]
    assert gpu_check.table(checks.rows).splitlines()[1].startswith("bad     FAILED ")
    spent = gpu_check.Checks(0)
    spent.check("late", lambda: spent.must([*python, ""], 20))
    assert spent.rows[0][1:] == ("not available", 0.0, gpu_check.NO_TIME)
    assert "why" in capsys.readouterr().out


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ptxas_report, "nvcc", lambda: None)
    monkeypatch.setattr(gpu_check, "module", lambda name: False)
    checks = gpu_check.Checks(30)
    checks.check("gate", gpu_check.nvcc_gate, checks, "sm_90a")
    checks.check("configure", gpu_check.configure, checks, tmp_path, "native")
    checks.check("tests", gpu_check.pytest_run, checks, [], {}, 5)
    checks.check("sanitizer", gpu_check.sanitizer_works, checks, tmp_path)
    assert {row.state for row in checks.rows} == {"not available"}
    words = [row.detail for row in checks.rows]
    assert words[0].startswith("nvcc was not found")
    assert words[1] == "cmake was not found"
    assert words[2].endswith("has no pytest")
    assert gpu_check.torch_state() == (False, f"{sys.executable} has no torch")


def test_unequal_twins_are_reported(tmp_path):
    lines = ["load 4: ok, 0123", "store 4: ok, 4567"]
    for name, content in (
        ("gpu", lines),
        ("emulated", [lines[0], "store 4: ok, 4568"]),
        ("short", lines[:1]),
    ):
        (tmp_path / f"{name}.txt").write_text("\n".join(content) + "\n")
    assert gpu_check.twins(tmp_path / "gpu", tmp_path / "gpu") == "2 cases with equal bits"
    with pytest.raises(gpu_check.Failed, match=r"GPU: store 4: ok, 4567; emulator: store 4: ok, 4568"):
        gpu_check.twins(tmp_path / "gpu", tmp_path / "emulated")
    with pytest.raises(gpu_check.Failed, match="2 cases on the GPU, 1 under the emulator"):
        gpu_check.twins(tmp_path / "gpu", tmp_path / "short")
    with pytest.raises(gpu_check.NotAvailable, match="no output of other"):
        gpu_check.twins(tmp_path / "gpu", tmp_path / "other")


SANITIZERS = {
    "works": (
        "echo '========= Invalid __global__ write of size 4 bytes, 1 hazard'; exit 9",
        "ok",
        "compute-sanitizer",
    ),
    "refuses": (
        "echo '========= Error: Device not supported'; exit 1",
        "not available",
        "Device not supported",
    ),
    "sees nothing": ("echo '========= ERROR SUMMARY: 0 errors'", "not available", "memcheck does not report"),
    "hangs": ("sleep 60", "not available", "memcheck does not report a planted fault"),
}


@pytest.mark.skipif(ptxas_report.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("case", SANITIZERS)
def test_the_probe_of_compute_sanitizer(case, tmp_path, monkeypatch):
    script, state, words = SANITIZERS[case]
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_check, "architecture", lambda: "90a")
    monkeypatch.setattr(gpu_check, "PROBE_SECONDS", 1)
    checks = gpu_check.Checks(60)
    checks.check("probe", gpu_check.sanitizer_works, checks, tmp_path)
    assert checks.rows[0].state == state, checks.rows[0].detail
    assert words in checks.rows[0].detail


@pytest.mark.full
@pytest.mark.skipif(ptxas_report.nvcc() is None, reason="needs nvcc")
def test_the_cases_link_over_the_cuda_runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "architecture", lambda: "90a")
    checks = gpu_check.Checks(300)
    assert checks.check("build", gpu_check.compile_conformance, checks, tmp_path / "program"), checks.rows
    done = checks.run([tmp_path / "program"], 60)
    lines = done.output.splitlines()
    assert len(lines) >= 40
    for line in lines:  # all of one kind, with a GPU or without
        assert re.search(r": (ok, [0-9a-f]{16}|eagle_cuda: no usable CUDA device: .*)$", line), line


@pytest.mark.full
def test_a_rehearsal_of_the_whole_check(program, tmp_path):
    """Every step of `make gpu-check` but the GPU, over the build under test."""
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "tools/gpu_check.py", "--rehearse", "--build", program.parent]
    done = subprocess.run([*command, "--json", report], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    outcome = json.loads(report.read_text())
    states = {row["check"]: row["state"] for row in outcome["results"]}
    assert outcome["rehearsal"] is True
    steps = "planted faults on the GPU", "ops, one call each", "ops in CUDA graphs", "op tests"
    assert {"wrappers: GPU = emulator", *steps} <= set(states)
    assert set(states.values()) == {"ok"}, done.stdout
    assert "A rehearsal: nothing ran on a GPU." in done.stdout
