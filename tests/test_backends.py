"""The switch between backends itself (conftest.py): a test runs on the kernels that it names, or fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, emulated_extension

INNER = """
import pytest, torch, eagle_cuda
from eagle_cuda.linear import linear, pack_weight

def walk():
    tree = eagle_cuda.tree_from_parents([[1, 2, 3]], [[-1, 0, 1]])
    target_tokens, seq_lens = torch.tensor([[2, 3, 4]]).int(), torch.zeros(1).int()
    return eagle_cuda.verify(tree, target_tokens, seq_lens)

@pytest.mark.op("verify")
def test_launches_what_it_names():
    assert walk().num_accepted.tolist() == [2]

@pytest.mark.op("verify", "compact_kv")
def test_launches_a_part_of_it():
    walk()

@pytest.mark.op("verify")
def test_fails_anyhow():
    assert walk().num_accepted.tolist() == [3]

def test_names_nothing():
    walk()

@pytest.mark.op("verify")
def test_counts(simulator):
    with simulator.counting() as one:
        walk()
    with simulator.counting() as two:
        walk(), walk()
    assert one.launches == 1 and one.threads >= 32 and one.global_store_bytes > 0
    assert two.global_store_bytes == 2 * one.global_store_bytes
    assert "verify.cu" in simulator.traffic_table()

@pytest.mark.op("verify")
def test_looks_at_counters_in_passing(kernels):
    with kernels.device(multiprocessors=1), kernels.counting() as counters:
        walk()
    assert counters.launches == 1 if kernels.counts else counters is None

@pytest.mark.op("linear")
def test_another_device(simulator):
    x, weight = torch.ones(2, 256), pack_weight(torch.ones(256, 256))
    def counted(**device):
        with simulator.device(**device), simulator.counting() as counters:
            linear(x, weight)
        return counters
    usual, few, one = counted(), counted(multiprocessors=2), counted(multiprocessors=1)
    assert one.threads < few.threads
    assert few.barriers != usual.barriers
    older = counted(compute_capability=80)  # no bulk copies, which are one request each
    assert older.global_load_requests > 2 * usual.global_load_requests
    with pytest.raises(KeyError), simulator.device(multiprocessors=1, compute_capability=80):
        raise KeyError
    with simulator.counting() as after:
        linear(x, weight)
    assert after == usual
"""


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest over INNER with this project's conftest."""
    (folder / "test_inner.py").write_text(INNER)
    (folder / "pytest.ini").write_text("[pytest]\n")
    paths = os.pathsep.join(str(ROOT / path) for path in (".", "python", "tests"))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rA", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("flavour", ["fast", "checked"])
def test_the_emulated_backend_runs_what_is_named_and_nothing_else(flavour, tmp_path):
    try:
        emulated_extension(flavour)
    except pytest.UsageError as error:
        pytest.skip(str(error))
    done = run(tmp_path, "--backend", "simt", "--simt", flavour, "--seed", "3")
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert "1 deselected" in done.stdout
    assert "compact_kv: expected a launch under the emulator, got none" in done.stdout
    assert "FAILED test_inner.py::test_launches_a_part_of_it" in done.stdout
    assert "FAILED test_inner.py::test_fails_anyhow" in done.stdout
    assert f"emulator: simt {flavour}, seed 3, preempt 0" in done.stdout
    assert "6 tests name the ops whose kernels they run; left out: 1 others" in done.stdout


def test_a_gpu_runs_what_is_named_and_counts_nothing(tmp_path):
    done = run(tmp_path, "-p", "gpu.rehearsal")
    assert "2 failed, 2 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "compact_kv: expected a call on the device, got none" in done.stdout
    for name in ("launches_what_it_names", "looks_at_counters_in_passing"):
        assert f"PASSED test_inner.py::test_{name}" in done.stdout


def test_a_cpu_has_no_kernels_to_compare(tmp_path):
    done = run(tmp_path)
    assert "the CPU backend has no such kernels" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 3 passed, 3 skipped" in done.stdout


def test_what_is_not_built_is_asked_for(tmp_path):
    named = str(tmp_path / "simt_fast" / "_C.so")
    done = run(tmp_path, "--backend", "simt", EAGLE_CUDA_EXTENSION=named)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--backend simt --simt fast: expected {tmp_path}" in done.stderr
    assert "run `make simt` first" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--simt", "checked"), "--simt checked: expected --backend simt, got --backend cpu"),
        (("--seed", "3"), "--seed 3: expected --backend simt, got --backend cpu"),
        (("--backend", "simt", "--seed", "-1"), "--seed: expected 0 to 2^64 - 1, got -1"),
        (("--backend", "simt", "--simt", "checked", "--preempt", "-5"), "--preempt: expected 0 to 2^31 - 1"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path, options, message):
    done = run(tmp_path, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr


def test_preemption_needs_checked_kernels(tmp_path):
    done = run(tmp_path, "--backend", "simt", "--preempt", "50")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--preempt: expected --simt checked, got --simt fast" in done.stderr
