"""Every benchmark runs, finds the ops' results equal to its references, and writes its figures."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SMALLEST = {
    "bench_attention": "--backend cpu --nodes 1 5 --contexts 40 --batches 1 2 --rounds 1",
    "bench_draft": "--backend cpu --trees 4:2:2 3:2:1 mc_sim_7b_63 --context 16 --rounds 1",
    "bench_linear": "--backend cpu --rows 1 2 --formats bf16 int4 --copies 1 --rounds 1",
    "bench_rejection": "--vocabs 1000 --levels 2 --batches 1 --rounds 1",
    "bench_sampling": "--vocabs 1000 --rows 1 2 --rounds 1",
    "bench_tree": "--nodes 20 --top-k 4 --levels 3 --layers 2 --batches 1 2 --rounds 1",
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a benchmark in this process and returns its figures; torch is left as it was."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()

    def run(name: str, arguments: str) -> dict:
        file = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", [name, *arguments.split(), "--json", str(file)])
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        return json.loads(file.read_text())

    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SMALLEST)
def test_runs(run, name, capsys):
    figures = run(name, SMALLEST[name])
    environment = figures["environment"]
    assert environment["num_threads"] >= 1
    assert environment["cpu_isa"] in capsys.readouterr().out
    rows = figures["results"][name.removeprefix("bench_")]
    assert len(rows) >= 4
    for row in rows:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert numbers
        assert all(math.isfinite(value) and value >= 0 for value in numbers), row


def test_make_bench_keeps_every_figure():
    """In one place each, and in the shape of timing.write_json; other prompts are other figures."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    root = BENCHMARKS.parent

    def commands(*arguments: str) -> str:
        command = ["make", "-n", "bench", *arguments]
        variables = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=True)
        return done.stdout

    assert "--json benchmarks/results/${name#bench_}.json" in commands()
    assert "end_to_end.py --json benchmarks/results/end_to_end_own_prompts.json" in commands()
    given = commands("PROMPTS=question.jsonl")
    assert "end_to_end.py --prompts question.jsonl --json benchmarks/results/end_to_end.json" in given
    for script in [*BENCHMARKS.glob("bench_*.py"), BENCHMARKS / "end_to_end.py"]:
        text = script.read_text()
        assert "write_json(" in text, script.name
        assert '"--json"' in text or "parser(__doc__" in text, script.name


def without_mask(real):
    """A node sees the prefix and itself, but no ancestors."""

    def attend(q, cache, *, mask, **options):
        return real(q, cache, mask=torch.zeros_like(mask), **options)

    return attend


def token_zero(real):
    def sample(*args, **options):
        out = real(*args, **options)
        out.tokens.zero_()
        return out

    return sample


def higher_scores(real):
    def draft(*args, **options):
        tree = real(*args, **options)
        tree.scores.add_(0.1)
        return tree

    return draft


def without_shape(real):
    return lambda *args, shape, **options: real(*args, **options)


def half(real):
    return lambda *args, **options: real(*args, **options).mul_(0.5)


def nothing(real):
    return lambda *args, **options: None


@pytest.mark.parametrize(
    ("noun", "op", "wrong", "bench", "message"),
    [
        ("attention", "tree_attention", without_mask, "bench_attention", "tree_attention"),
        ("attention", "append_kv", nothing, "bench_attention", "append_kv"),
        ("draft", "draft", higher_scores, "bench_draft", "not what it should be"),
        ("draft", "draft", without_shape, "bench_draft", "mc_sim_7b_63: the tree is not what it should be"),
        ("linear", "linear", half, "bench_linear", "differs from torch"),
        ("sampling", "sample_tokens", token_zero, "bench_sampling", "noised argmax"),
        ("tree", "expand_tree", nothing, "bench_tree", "expand_tree"),
        ("kv_cache", "compact_kv", nothing, "bench_tree", "compact_kv"),
    ],
)
def test_a_wrong_result_is_not_timed(run, monkeypatch, noun, op, wrong, bench, message):
    module = importlib.import_module(f"eagle_cuda.{noun}")
    monkeypatch.setattr(module, op, wrong(getattr(module, op)))
    with pytest.raises(SystemExit, match=message):
        run(bench, SMALLEST[bench])
