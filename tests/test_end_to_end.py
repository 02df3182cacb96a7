"""The benchmarks that run the whole engine, on a tiny random model: end_to_end.py, coupled_drafting.py and
exact_demo.py."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from eagle_decode.metrics import Metrics
from tiny_folders import write_folders

pytestmark = pytest.mark.filterwarnings("ignore:none of .* draft tokens was accepted")  # the head is random

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    return write_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("end_to_end")


@pytest.fixture
def prompts(tmp_path) -> str:
    lines = [json.dumps({"turns": [text, "more"]}) + "\n" for text in ("Hello", "Why?", "How?")]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    return str(tmp_path / "prompts.jsonl")


def test_every_mode_is_measured(folders, benchmark, prompts, monkeypatch, tmp_path, capsys):
    target, head = folders
    monkeypatch.setattr(
        sys,
        "argv",
        ["end_to_end.py", "--target", target, "--head", head, "--prompts", prompts, "--num-prompts", "2",
         "--max-new-tokens", "12", "--repeats", "2", "--trees", "4:3:2,8:4:4", "--json", str(tmp_path /
         "out.json")],
    )  # fmt: skip
    benchmark.main()
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["environment"]["cpu_isa"]
    figures = written["results"]
    rows = {row["mode"]: row for row in figures["modes"]}
    assert list(rows) == ["transformers", "plain", "tree 4:3:2", "tree 8:4:4"]
    for name in ("plain", "tree 4:3:2", "tree 8:4:4"):
        assert rows[name]["identical_to_plain"] == 2
        assert rows[name]["num_tokens"] == [12, 12]
    assert rows["plain"]["ratio_to_plain_median"] == rows["plain"]["ratio_to_plain_best"] == 1
    assert all(len(runs) == 2 for row in rows.values() for runs in row["seconds"])
    assert [row["goal"] for row in figures["goals"]] == [
        "tokens per cycle, 8 nodes",
        "plain / transformers",
        "speculative / plain",
    ]
    assert "Greedy decoding" in capsys.readouterr().out


def test_ratios(benchmark):
    """Two prompts, two runs each; the slow second runs of prompt 0 must not touch what is taken from
    minima."""

    def mode(name: str, seconds: list[list[float]], tokens=(1, 2, 3)):
        made = benchmark.Mode(name, None)
        made.runs = [[benchmark.Run(list(tokens), s, None) for s in runs] for runs in seconds]
        return made

    plain = mode("plain", [[1.0, 9.0], [2.0, 2.0]])
    fast = mode("tree 8:4:4", [[0.5, 9.0], [1.0, 1.0]])
    slow = mode("transformers", [[4.0, 36.0], [8.0, 8.0]], tokens=(1, 2, 4))
    rows = {row["mode"]: row for row in benchmark.summarise([slow, plain, fast], 2)}
    assert rows["tree 8:4:4"]["ratio_to_plain_best"] == pytest.approx(2.0)
    assert rows["transformers"]["ratio_to_plain_best"] == pytest.approx(0.25)
    assert rows["tree 8:4:4"]["identical_to_plain"] == 2
    assert rows["transformers"]["identical_to_plain"] == 0
    reached = {row["goal"]: row for row in benchmark.goals(list(rows.values()))}
    assert reached["plain / transformers"]["minima"] == pytest.approx(4.0)
    assert reached["speculative / plain"]["minima"] == pytest.approx(2.0)
    with pytest.raises(SystemExit, match="trees"):
        benchmark.parse_trees("8:4")
    assert benchmark.parse_trees("8:4:4") == [benchmark.Tree(8, 4, 4)]


@pytest.fixture
def coupling(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("coupled_drafting")


def test_drafting_is_compared_along_the_same_texts(folders, coupling, prompts, monkeypatch, tmp_path):
    target, head = folders
    arguments = ["--target", target, "--head", head, "--prompts", prompts, "--num-prompts", "2"]
    arguments += ["--max-new-tokens", "12", "--temperatures", "0.7,1", "--seeds", "3,4", "--taus", "1,1.5"]
    arguments += ["--couplings", "default,0,0.5", "--top-p", "0.9"]
    arguments += ["--tree", "8:4:4", "--every", "5", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["coupled_drafting.py", *arguments])
    coupling.main()
    figures = json.loads((tmp_path / "out.json").read_text())["results"]
    rows = figures["free_running"]
    hot = ["usual", "coupled", "coupled, tau 1.5", "coupling 0.5", "coupling 0.5, tau 1.5"]
    assert [(row["temperature"], row["drafting"]) for row in rows] == [
        (0.0, "greedy"), *((0.7, arm) for arm in hot), *((1.0, arm) for arm in hot)
    ]  # fmt: skip
    assert [row["tokens"] for row in rows] == [24] + [48] * 10
    cycles = figures["single_cycles"]
    assert [row["drafting"] for row in cycles] == ["greedy", *hot]
    assert {row["cycles"] for row in cycles} == {2 * 2 * 3}  # at tokens 0, 5 and 10 of four texts


def test_couplings_are_compared_at_the_same_places(folders, prompts, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("coupling")
    target, head = folders
    arguments = ["--target", target, "--head", head, "--prompts", prompts, "--num-prompts", "2"]
    arguments += ["--max-new-tokens", "20", "--temperatures", "0,1", "--couplings", "0,0.5,1", "--every", "4"]
    arguments += ["--trees", "8:4:4", "--batch", "3", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["coupling.py", *arguments])
    benchmark.main()
    rows = json.loads((tmp_path / "out.json").read_text())["results"]["rows"]
    assert [(row["temperature"], row["truncation"]) for row in rows] == [
        (t, name) for t in (0, 1) for name in ("min-p 0.05", "none", "top-k 20", "top-p 0.9", "truncated")
    ]
    for row in rows:
        figures = row["tokens_per_cycle"]
        assert list(figures) == ["0.0", "0.5", "1.0"]
        assert all(1 <= figure <= 5 for figure in figures.values())
        assert row["temperature"] == 1 or len(set(figures.values())) == 1
    assert {row["cycles"] for row in rows if row["truncation"] != "truncated"} <= set(range(4, 9))

    tree = benchmark.Drafted(None, 1.0, 0, 2, [5, 7, 8, 7, 9], [-1, 0, 0, 2, 3])
    for text, tokens in {(1, 5, 6): 1, (1, 5, 7, 7): 2, (1, 5, 8, 7, 9, 4): 4, (1, 5, 8, 7): 2}.items():
        assert tree.tokens_of_cycle(list(text)) == tokens


def test_another_text_is_an_error(folders, coupling, prompts, monkeypatch):
    """What the comparison rests on: both ways of drafting write the same."""
    generate = coupling.Engine.generate

    def one_wrong(engine, *arguments, **options):
        (result,) = generate(engine, *arguments, **options)
        result.tokens[-1] += engine.drafter._coupling == 0
        return [result]

    monkeypatch.setattr(coupling.Engine, "generate", one_wrong)
    target, head = folders
    arguments = ["--target", target, "--head", head, "--prompts", prompts, "--num-prompts", "1"]
    arguments += ["--max-new-tokens", "4", "--temperatures", "1", "--seeds", "3", "--tree", "8:4:4"]
    monkeypatch.setattr(sys, "argv", ["coupled_drafting.py", *arguments])
    with pytest.raises(AssertionError, match="prompt 1, .* seed 3: another text"):
        coupling.main()


def test_ratios_of_drafting(coupling):
    def counts(*accepted: int) -> Metrics:
        made = Metrics()
        for length in accepted:
            made.count_cycle(length, 8)
        return made

    greedy, usual, coupled = coupling.arms_of([1.0], [None], [1.0])
    rows = coupling.summarise({greedy: counts(2, 2), usual: counts(0, 1), coupled: counts(2, 1)})
    assert [row["tokens_per_cycle"] for row in rows] == [3.0, 1.5, 2.5]
    assert rows[2]["of_greedy"] == pytest.approx(2.5 / 3)
    assert rows[2]["tokens_per_cycle_to_usual"] == pytest.approx(2.5 / 1.5)
    assert rows[2]["accepted_to_usual"] == pytest.approx(3.0)


@pytest.fixture
def exact(folders, prompts, monkeypatch, tmp_path):
    """Runs exact_demo.py over two prompts; returns what it exits with, and its figures by temperature."""
    target, head = folders
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("exact_demo")
    monkeypatch.setattr(module, "GROUP", 1)

    def run(*arguments: str) -> tuple[int, list[dict]]:
        given = ["--target", target, "--head", head, "--prompts", prompts, "--num-prompts", "2"]
        given += ["--max-new-tokens", "12", "--state", str(tmp_path / "state"), *arguments]
        monkeypatch.setattr(sys, "argv", ["exact_demo.py", *given, "--json", str(tmp_path / "out.json")])
        code = module.main()
        return code, json.loads((tmp_path / "out.json").read_text())["results"]["temperatures"]

    run.module = module
    return run


def test_every_prompt_is_the_same_both_ways(exact, monkeypatch):
    code, rows = exact()
    assert code == 0
    assert [(row["temperature"], row["prompts"], row["identical"], row["tokens"]) for row in rows] == [
        (0.0, 2, 2, 24), (1.0, 2, 2, 24)
    ]  # fmt: skip
    monkeypatch.setattr(exact.module, "run_group", None)  # all of it is known already
    assert exact() == (0, rows)


def test_one_other_text_is_counted(exact, monkeypatch):
    generate = exact.module.Engine.generate

    def one_wrong(engine, prompts, sampling, *, speculate=True):
        results = generate(engine, prompts, sampling, speculate=speculate)
        if speculate and sampling[0].temperature:
            results[0].logprobs[-1] *= 1 + 1e-7
        return results

    monkeypatch.setattr(exact.module.Engine, "generate", one_wrong)
    code, rows = exact()
    assert (code, [row["identical"] for row in rows]) == (1, [2, 0])
