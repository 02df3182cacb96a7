"""The proof of exactness: random configurations (exact_draws.py) run plainly and speculatively, equal to the
bit, until everything that matters has occurred; and the same with one mechanism broken, which must be seen.

A million tokens of it: `make test-exact` (exactness.py).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import exactness
from exact_draws import Draw, draw
from exact_faults import FAULTS, in_lanes, noise_by_step
from exact_runs import check
from exactness import Coverage, State, progress, prove


def prove_all(tokens: int, *, complete_levels: int, widest: int, **options: Any) -> None:
    """That many tokens, and more until everything has occurred."""

    def missing(coverage: Coverage) -> list[str]:
        return coverage.missing(complete_levels=complete_levels, widest=widest)

    coverage = prove(tokens, until=lambda coverage: not missing(coverage), **options)
    assert missing(coverage) == []


def test_any_configuration():
    prove_all(12_000, seed=4, most=900, complete_levels=4, widest=128)


@pytest.mark.full
def test_many_configurations():
    prove_all(50_000, seed=2, complete_levels=16, widest=256)


def small(suits: Callable[[Draw], bool], count: int, tokens: int = 1000) -> list[Draw]:
    """Configurations that take little time, whatever stands in for an op."""
    drawn = (draw(3, index) for index in range(3000))
    fit = (d for d in drawn if suits(d) and d.most_tokens <= tokens and 2 < d.tree.nodes <= 17)
    return list(itertools.islice((d for d in fit if d.max_length <= 150), count))


def of_emulator(drafter: str) -> Callable[[Draw], bool]:
    """Of a type that tensor cores take, with something to sample."""
    return lambda drawn: (
        drawn.tree.drafter == drafter
        and drawn.model.dtype != "float32"
        and any(params.temperature > 0.5 for _, params in drawn.requests)
    )


@pytest.mark.op("append_kv", "tree_attention", "sample_tokens", "verify", "compact_kv")
@pytest.mark.unchecked
@pytest.mark.parametrize("drafter", ["tree", "static", "chain", "eagle1", "eagle3"])
def test_small_configurations(drafter):
    """Under the emulator too: there the target runs on the CUDA kernels, and the heads."""
    (drawn,) = small(of_emulator(drafter), 1, tokens=100)
    outcome = check(drawn)
    assert outcome.difference is None
    assert sum(outcome.recorder.lengths.values()) > 5


@pytest.mark.full
@pytest.mark.op("append_kv", "tree_attention", "sample_tokens", "verify", "compact_kv")
@pytest.mark.unchecked
@pytest.mark.parametrize("drafter", ["tree", "static", "chain", "eagle1", "eagle3"])
def test_more_small_configurations(drafter):
    for drawn in small(of_emulator(drafter), 4, tokens=300)[1:]:
        assert check(drawn).difference is None


# ---- that it can fail


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_seen(name):
    fault, suits = FAULTS[name]
    with fault():
        seen = next((drawn for drawn in small(suits, 12) if check(drawn).difference), None)
    assert seen is not None
    assert check(seen).difference is None


def test_another_attention_in_order_of_position_is_equal():
    """So what "keys by slot" shows is the order, and nothing else about the attention that stands in."""
    with in_lanes(by_slot=False)():
        for drawn in small(lambda drawn: drawn.tree.branching > 1, 3):
            assert check(drawn).difference is None


def test_a_failure_names_the_command_that_repeats_it(monkeypatch, capsys, tmp_path):
    """And the run that is stopped there goes on there."""
    arguments = ["exactness.py", "--tokens", "3000", "--seed", "3", "--state", str(tmp_path)]
    with noise_by_step():
        monkeypatch.setattr(sys, "argv", arguments)
        assert exactness.main() == 1
        shown = capsys.readouterr().out
        command = re.search("to repeat: python tests/(.*)", shown)[1].split()
        monkeypatch.setattr(sys, "argv", command)
        assert exactness.main() == 1
        assert re.search("token after equal logits: plain .* the two best plain logits are .* apart", shown)
        assert re.search("request 0, .*: token after equal", capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", command)
    assert exactness.main() == 0


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    whole = prove(250, seed=352)
    assert whole.configurations == 2
    state = State.of(tmp_path, 352, fresh=False)
    with progress(state, 100) as after:
        prove(100, seed=352, coverage=state.coverage, after_each=after)
    resumed = State.of(tmp_path, 352, fresh=False)
    assert resumed.coverage == state.coverage
    assert 100 <= resumed.coverage.tokens < whole.tokens
    assert prove(250, seed=352, coverage=resumed.coverage) == whole
    assert State.of(tmp_path, 352, fresh=True).coverage == Coverage()
    State(resumed.path, "another library", coverage=whole).save()
    assert State.of(tmp_path, 352, fresh=False).coverage == Coverage()


@pytest.mark.full
def test_processes_share_a_seed():
    assert prove(100, seed=352, jobs=2) == prove(100, seed=352)


def test_what_did_not_occur_is_named():
    coverage = prove(60, seed=352)
    missing = coverage.missing(complete_levels=3, widest=256)
    assert "no ended inside a path: context" in missing
    assert "no drafter chain" in missing
    assert f"no tree of 256 nodes, at most {coverage.widest}" in missing
    coverage.lengths[3] = Counter({0: 5, 2: 1})
    assert "trees of 3 levels: never accepted [1, 3]" in coverage.missing(complete_levels=3, widest=1)
