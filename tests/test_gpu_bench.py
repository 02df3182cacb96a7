"""`make gpu-bench`: what it runs, and with how much time."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tools import gpu_bench


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_bench", *map(str, arguments)])
    return gpu_bench.main()


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(gpu_bench.gpu_check, "torch_state", lambda: (False, "torch sees no GPU"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.full
def test_floors_without_a_gpu(monkeypatch, without_gpu, capfd, tmp_path):
    """One file a benchmark, floors in each."""
    assert run(monkeypatch, "--json", tmp_path) == 0
    out = capfd.readouterr().out
    assert out.startswith("gpu-bench: torch sees no GPU")
    assert out.count("No GPU is here") == 3
    for name in gpu_bench.SHARES:
        assert len(json.loads((tmp_path / f"{name}.json").read_text())["results"]["floors"]) > 10


def test_minutes_are_shared_and_passed_on(monkeypatch, without_gpu):
    """The first one takes half of its time; the second too long; what is left is the third's."""
    now, minutes = [0.0], {}

    def take(command, **options):
        name = command[1].stem.removeprefix("bench_")
        minutes[name] = float(command[command.index("--minutes") + 1])
        now[0] += 60 * {"linear": 1.5, "draft": 4.0, "attention": 1.0}[name]
        return SimpleNamespace(returncode=int(name == "draft"))

    monkeypatch.setattr(gpu_bench.subprocess, "run", take)
    monkeypatch.setattr(gpu_bench.time, "monotonic", lambda: now[0])
    assert run(monkeypatch, "--minutes", 8) == 1
    assert list(minutes) == ["linear", "draft", "attention"]
    assert minutes["linear"] == 3.0
    assert minutes["draft"] == 3.25
    assert minutes["attention"] == 2.5


def test_options_are_of_one_benchmark(monkeypatch, without_gpu, capfd):
    assert run(monkeypatch, "--only", "attention", "--shapes", "llama8b", "--nodes", "16") == 0
    assert "No GPU is here" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, "--shapes", "llama8b")
    assert "--shapes llama8b: expected --only and one benchmark" in capfd.readouterr().err
