"""The emulator's own tests (tests/simt/selftest): for every rule a clean kernel that must pass in silence,
and one with the bug planted that must be reported, at the right line."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import emulator_build

TIMEOUT = 100  # of a process; it takes 3 s
SOURCES = sorted((Path(__file__).resolve().parent / "simt" / "selftest").glob("*.cu"))


@dataclass(frozen=True)
class Run:
    """One process that runs every case."""

    flavour: str  # fast, checked
    seed: int = 0
    preempt: int = 0

    def __str__(self) -> str:
        return f"{self.flavour}-{self.seed}-{self.preempt}"


RUNS = [Run("fast"), Run("checked"), Run("checked", seed=1, preempt=7)]
MANY_RUNS = [
    Run("fast", seed=2),
    *(Run("checked", seed, preempt) for seed, preempt in [(2, 2), (3, 20), (4, 200)]),
]


@dataclass(frozen=True)
class Case:
    kind: str  # of the report that it must bring: "race" any race, "x or y" as the schedule has it, "" none
    checked_only: bool


# "reported" or "other"; a case, or the part of its name before the slash; the marked lines
Marks = dict[str, dict[str, set[str]]]


def read_sources() -> tuple[dict[str, Case], Marks]:
    cases: dict[str, Case] = {}
    marks: Marks = {"reported": defaultdict(set), "other": defaultdict(set)}
    for path in SOURCES:
        text = path.read_text()
        constants = dict(re.findall(r'constexpr auto (k\w+) = "([^"]*)";', text))
        rows = re.findall(r'^      \{"([\w/]+)", ("[^"]*"|k\w+),(.*?)\},$', text, re.M | re.S)
        for case, kind, rest in rows:
            cases[case] = Case(constants.get(kind, kind.strip('"')), "kChecked" in rest)
        for number, line in enumerate(text.splitlines(), 1):
            for what, names in re.findall(r"// <- (reported|other): ([\w/, ]+)$", line):
                for name in names.split(", "):
                    marks[what][name].add(f"{path.name}:{number}")
    return cases, marks


CASES, MARKS = read_sources()


def marked(what: str, case: str) -> set[str]:
    return MARKS[what].get(case, set()) | MARKS[what].get(case.partition("/")[0], set())


# ---- running ------------------------------------------------------------------------------------


def executable(flavour: str) -> Path:
    path = emulator_build() / f"selftest_{flavour}"
    assert path.is_file(), f"expected {path}; run `make simt`"
    return path


def start(
    flavour: str, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(executable(flavour)), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            out, error = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            error += f"not done after {TIMEOUT} s"
    return subprocess.CompletedProcess(command, process.returncode, out, error)


@functools.cache
def results(run: Run) -> dict[str, dict]:
    """By case. A crash or a hang loses the cases behind it; "" then says so."""
    done = start(run.flavour, "all", run.seed, run.preempt)
    records = {record["case"]: record for record in map(json.loads, done.stdout.splitlines())}
    if done.returncode:
        last = next(reversed(records), "the beginning")
        records[""] = {"error": f"{run} ended with {done.returncode} behind {last}: {done.stderr[-2000:]}"}
    return records


def result(run: Run, case: str) -> dict:
    print(f"again: {executable(run.flavour)} {case} {run.seed} {run.preempt}")
    record = results(run).get(case)
    assert record is not None, results(run).get("", {"error": f"{run} did not run {case}"})["error"]
    if record["skip"]:
        pytest.skip(record["skip"])
    return record


# ---- what a report says -------------------------------------------------------------------------


def places(message: str) -> tuple[set[str], set[str]]:
    """Lines of a report: the access it is about with its chain of inlined calls, and the earlier one's."""
    found = re.match(r"at (.+?)(?:, earlier access at (.+?))?: ", message)
    assert found, f"no place in {message!r}"
    chains = [set(chain.split(" < ")) if chain else set() for chain in found.groups()]
    return chains[0], chains[1]


def check_clean(record: dict) -> None:
    assert not record["reports"]
    assert not record["error"]
    assert record["right"] is True


RACES = ("read-after-write", "write-after-read", "write-after-write")


def check_reported(case: str, record: dict) -> None:
    kind, reported, other = record["kind"], marked("reported", case), marked("other", case)
    kinds, lines = set(kind.split(" or ")), reported
    if "race" in kinds:  # which of the two sides comes first is the schedule's choice
        kinds, lines = kinds | {f"race {how}" for how in RACES}, reported | other
    found = [report for report in record["reports"] if report["kind"] in kinds]
    assert found, f"expected {kind!r}, got {record['reports']}"
    assert "at " in record["error"], "the op must fail with its reports as the message"
    if shutil.which("addr2line") is None:
        return  # reports then hold addresses
    assert any(places(report["message"])[0] & lines for report in found), f"expected {lines}, got {found}"
    for report in record["reports"]:
        for chain in places(report["message"]):
            assert not chain or chain & (reported | other), f"expected {reported | other}, got {report}"


def pairs(runs: list[Run]) -> list[pytest.ParameterSet]:
    return [
        pytest.param(case, run, id=f"{case}-{run}")
        for case in CASES
        for run in runs
        if run.flavour == "checked" or not CASES[case].checked_only
    ]


def check(case: str, run: Run) -> None:
    record = result(run, case)
    assert record["kind"] == CASES[case].kind
    if record["kind"]:
        check_reported(case, record)
    else:
        check_clean(record)


@pytest.mark.parametrize(("case", "run"), pairs(RUNS))
def test_case(case, run):
    check(case, run)


@pytest.mark.full
@pytest.mark.parametrize(("case", "run"), pairs(MANY_RUNS))
def test_case_under_other_schedules(case, run):
    check(case, run)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5, 17))
def test_clean_cases_stay_silent(seed):
    run = Run("checked", seed, preempt=1 + seed % 9)
    assert "" not in results(run), results(run)[""]["error"]
    for case, record in results(run).items():
        if not record["kind"] and not record["skip"]:
            assert (case, record["reports"], record["right"]) == (case, [], True)


# ---- the tests themselves -----------------------------------------------------------------------


def test_every_bug_has_a_marked_line_and_every_mark_a_bug():
    bugs = {name for name, case in CASES.items() if case.kind}
    assert len(bugs) > 60
    assert not [name for name in bugs if not marked("reported", name)]
    names = bugs | {name.partition("/")[0] for name in bugs}
    assert {name for table in MARKS.values() for name in table} <= names


@pytest.mark.parametrize("flavour", ["fast", "checked"])
def test_the_program_runs_the_cases_of_the_sources(flavour):
    listed = start(flavour, "--list").stdout.split()
    assert listed == list(dict.fromkeys(listed))
    assert set(listed) == {
        name for name, case in CASES.items() if flavour == "checked" or not case.checked_only
    }


def test_unknown_case():
    done = start("fast", "no_such_case")
    assert done.returncode == 2
    assert "no case no_such_case" in done.stderr


# ---- counters and reports -----------------------------------------------------------------------

# Who polls takes as many turns as the schedule has it.
POLLING = {"phases", "often", "grid", "grid_barrier", "flag", "lock", "wait", "atomic_totals"}


def clean_counters(run: Run) -> dict[str, dict[str, int]]:
    found = {}
    for case, record in results(run).items():
        if not CASES[case].kind and case.partition("/")[0] not in POLLING | {"account", "after"}:
            found[case] = record["counters"]
    return found


def test_counters_do_not_depend_on_the_schedule():
    in_order = clean_counters(Run("checked"))
    assert len(in_order) > 50
    assert clean_counters(RUNS[2]) == in_order


def test_a_seed_is_one_schedule():
    """Another than that in order; the same each time, also for a case alone."""

    def alone(seed: int, preempt: int = 0) -> dict:
        return json.loads(start("checked", "flag/atomic", seed, preempt).stdout)

    in_order = results(RUNS[1])["flag/atomic"]
    assert alone(0) == in_order
    for seed in (1, 2):
        assert alone(seed)["counters"]["atomics"] != in_order["counters"]["atomics"]
    assert alone(RUNS[2].seed, RUNS[2].preempt) == results(RUNS[2])["flag/atomic"]


def test_both_builds_count_global_memory_alike():
    fast, checked = clean_counters(Run("fast")), clean_counters(Run("checked"))
    for case, counters in fast.items():
        for name, value in counters.items():
            if not name.startswith("shared_"):
                assert (case, name, checked[case][name]) == (case, name, value)


def test_without_addr2line_a_report_names_module_and_offset(tmp_path):
    done = start("checked", "reverse/no_barrier", env={**os.environ, "PATH": str(tmp_path)})
    record = json.loads(done.stdout)
    assert re.search(
        r"at selftest_checked\+0x[0-9a-f]+, earlier access at selftest_checked\+0x", record["error"]
    )
