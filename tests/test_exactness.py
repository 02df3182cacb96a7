"""The proof of exactness: random configurations (exact_draws.py) run plainly and speculatively, equal to the
bit, until everything that matters has occurred; and the same with one mechanism broken, which must be seen.

A million tokens of it: `make test-exact` (exactness.py).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator

import pytest

import exactness
from exact_draws import Draw, draw
from exact_faults import FAULTS, in_lanes, noise_by_step
from exact_runs import check
from exactness import Coverage, State, progress, prove


def test_any_configuration():
    coverage = prove(25_000, seed=1)
    assert coverage.missing(complete_levels=4, widest=128) == []


@pytest.mark.full
def test_many_configurations():
    coverage = prove(150_000, seed=2)
    assert coverage.missing(complete_levels=16, widest=256) == []


# ---- that it can fail


def small(suits: Callable[[Draw], bool], count: int) -> Iterator[Draw]:
    """Configurations that take little time, whatever stands in for an op."""
    drawn = (draw(3, index) for index in range(2000))
    fit = (d for d in drawn if suits(d) and 2 < d.tree.nodes <= 17 and d.max_length <= 150)
    return itertools.islice((d for d in fit if max(len(p) for p, _ in d.requests) <= 70), count)


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
    whole = prove(2500, seed=4)
    state = State.of(tmp_path, 4, fresh=False)
    with progress(state, 1000) as after:
        prove(1000, seed=4, coverage=state.coverage, after_each=after)
    resumed = State.of(tmp_path, 4, fresh=False)
    assert 1000 <= resumed.coverage.tokens < whole.tokens
    assert prove(2500, seed=4, coverage=resumed.coverage) == whole
    other = State(resumed.path, "another library")
    other.save()
    assert State.of(tmp_path, 4, fresh=False).coverage == Coverage()


def test_what_did_not_occur_is_named():
    coverage = prove(500, seed=5)
    missing = coverage.missing(complete_levels=3, widest=256)
    assert "no ended inside a path: context" in missing or len(missing) > 5
