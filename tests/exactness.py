"""Speculative decoding emits what plain decoding emits: proved by running random configurations both ways.

    python tests/exactness.py                                 # a million tokens; resumes where it was stopped
    python tests/exactness.py --tokens 20000 --seed 5
    python tests/exactness.py --seed 5 --only 17              # one configuration, as a failure names it

`make test-exact` runs it and writes benchmarks/results/exactness.json. What the configurations are made of
stands in exact_draws.py, what is compared and counted in exact_runs.py; test_exactness.py runs some of it in
`make test` and breaks one mechanism after the other to see it fail.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import eagle_cuda
from eagle_cuda._extension import _C
from exact_draws import (
    COUPLINGS,
    DRAFTERS,
    DTYPES,
    FAMILIES,
    HEAD_FORMATS,
    PAGE_SIZES,
    TEMPERATURES,
    Draw,
    draw,
)
from exact_runs import FEATURES, Outcome, check

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("eagle_cuda/*.py", "python/eagle_decode/**/*.py", "tests/exact_draws.py", "tests/exact_runs.py")
SOURCES += ("tests/oracle_drafter.py", "tests/tiny_models.py", "tests/random_heads.py")
EVENTS = (
    "best paths", "other paths", "paths in place", "paths that moved rows", "ended inside a path: stop token",
    "ended inside a path: budget", "ended inside a path: context", "joined a running batch",
    "left a running batch", "changed its row", "ties at the top",
    *(f"accepted at T = {value:g}" for value in dict.fromkeys(TEMPERATURES)),
    *(f"accepted with {name}" for name in FEATURES),
)  # fmt: skip


class Unequal(AssertionError):
    """A configuration whose speculative run is not the plain one."""

    def __init__(self, drawn: Draw, outcome: Outcome):
        super().__init__(
            f"not what plain decoding emits\n{outcome.difference}\n{drawn.describe()}\n"
            f"to repeat: python tests/exactness.py --seed {drawn.seed} --only {drawn.index}"
        )


@dataclass
class Coverage:
    """What the speculative runs went through.

    tokens_by: part of the configuration -> its value -> tokens compared.
    lengths: of drafters that know the continuation, levels -> accepted length -> cycles. head_lengths: of
        heads, accepted length -> cycles.
    """

    configurations: int = 0
    requests: int = 0
    tokens: int = 0
    cycles: int = 0
    accepted: int = 0
    widest: int = 0
    tokens_by: dict[str, Counter[str]] = field(default_factory=dict)
    lengths: dict[int, Counter[int]] = field(default_factory=dict)
    head_lengths: Counter[int] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def add(self, drawn: Draw, outcome: Outcome) -> None:
        recorder = outcome.recorder
        self.configurations += 1
        self.requests += sum(params.n for _, params in drawn.requests)
        self.tokens += outcome.tokens
        self.cycles += sum(recorder.lengths.values())
        self.accepted += sum(length * count for length, count in recorder.lengths.items())
        self.widest = max(self.widest, recorder.widest)
        parts = {
            "drafter": drawn.tree.drafter,
            "dtype": drawn.model.dtype,
            "family": drawn.model.family,
            "window": drawn.model.sliding_window is not None,
            "page size": drawn.speculative.page_size,
            "batch": drawn.speculative.batch,
        }
        if drawn.tree.drafter.startswith("eagle"):
            parts |= {"coupling": drawn.tree.coupling, "head format": drawn.tree.head_format}
            self.head_lengths.update(recorder.lengths)
        for name, value in parts.items():
            self.tokens_by.setdefault(name, Counter())[str(value)] += outcome.tokens
        if not drawn.tree.drafter.startswith("eagle"):
            self.lengths.setdefault(drawn.tree.levels, Counter()).update(recorder.lengths)
        self.events.update(recorder.events)

    def missing(self, *, complete_levels: int, widest: int) -> list[str]:
        """What these runs should have gone through and did not.

        complete_levels: trees of so many levels or fewer must have been accepted to every depth. widest:
        nodes of the widest tree.
        """
        found = [f"no {event}" for event in EVENTS if not self.events[event]]
        for name, values in {
            "drafter": DRAFTERS, "dtype": DTYPES, "family": FAMILIES, "window": (True, False),
            "page size": PAGE_SIZES, "coupling": COUPLINGS, "head format": HEAD_FORMATS,
        }.items():  # fmt: skip
            seen = self.tokens_by.get(name, Counter())
            found += [f"no {name} {value}" for value in dict.fromkeys(values) if not seen[str(value)]]
        for levels in range(1, complete_levels + 1):
            never = [n for n in range(levels + 1) if not self.lengths.get(levels, {}).get(n)]
            if never and levels in self.lengths:
                found.append(f"trees of {levels} levels: never accepted {never}")
        found += [f"no head was right {n} times" for n in range(4) if not self.head_lengths[n]]
        if max(self.lengths, default=0) < complete_levels:
            found.append(f"no tree of {complete_levels} levels")
        if self.widest < widest:
            found.append(f"no tree of {widest} nodes, at most {self.widest}")
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "tokens_by": {name: dict(sorted(values.items())) for name, values in self.tokens_by.items()},
            "lengths": {
                levels: dict(sorted(counts.items())) for levels, counts in sorted(self.lengths.items())
            },
            "head_lengths": dict(sorted(self.head_lengths.items())),
            "events": dict(sorted(self.events.items())),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Coverage:
        made = cls(**stored)
        made.tokens_by = {name: Counter(values) for name, values in stored["tokens_by"].items()}
        made.lengths = {
            int(levels): Counter({int(n): count for n, count in counts.items()})
            for levels, counts in stored["lengths"].items()
        }
        made.head_lengths = Counter({int(n): count for n, count in stored["head_lengths"].items()})
        made.events = Counter(stored["events"])
        return made


def prove(
    tokens: int,
    *,
    seed: int = 0,
    jobs: int = 1,
    most: int | None = None,
    until: Callable[[Coverage], bool] = lambda coverage: True,
    coverage: Coverage | None = None,
    after_each: Callable[[Coverage], None] = lambda coverage: None,
) -> Coverage:
    """Compares configurations 0, 1, ... of a seed until so many tokens are compared. Raises Unequal at the
    first that differs.

    jobs: processes. coverage: of an earlier call, which is gone on with. most: leaves out configurations that
    can emit more tokens; neither with jobs nor with coverage. until: what else must hold before it ends,
        for at most four times the tokens: which tokens come out depends on the processor.
    """
    coverage = coverage or Coverage()
    if most is None:
        made = _outcomes(seed, coverage.configurations, jobs)
    else:
        assert jobs == 1
        assert coverage.configurations == 0
        made = (_outcome(seed, i) for i in itertools.count() if draw(seed, i).most_tokens <= most)
    with contextlib.closing(made) as outcomes:
        while coverage.tokens < tokens or (coverage.tokens < 4 * tokens and not until(coverage)):
            drawn, outcome = next(outcomes)
            if outcome.difference:
                raise Unequal(drawn, outcome)
            coverage.add(drawn, outcome)
            after_each(coverage)
    return coverage


def _outcomes(seed: int, first: int, jobs: int) -> Iterator[tuple[Draw, Outcome]]:
    """Of configurations first, first + 1, ... in this order, however many processes work on them."""
    if jobs == 1:
        for index in itertools.count(first):
            yield _outcome(seed, index)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        pending = deque(pool.submit(_outcome, seed, first + i) for i in range(4 * jobs))
        for index in itertools.count(first + len(pending)):
            yield pending.popleft().result()
            pending.append(pool.submit(_outcome, seed, index))
    finally:
        pool.shutdown(cancel_futures=True)


def _outcome(seed: int, index: int) -> tuple[Draw, Outcome]:
    drawn = draw(seed, index)
    return drawn, check(drawn)


# ---- the program


@dataclass
class State:
    """Where a run was stopped: worth something as long as neither library nor proof changes."""

    path: Path
    digest: str
    seconds: float = 0.0
    coverage: Coverage = field(default_factory=Coverage)

    @classmethod
    def of(cls, folder: Path, seed: int, fresh: bool) -> State:
        state = cls(folder / f"seed{seed}.json", digest())
        if state.path.is_file() and not fresh:
            stored = json.loads(state.path.read_text())
            if stored["digest"] == state.digest:
                state.seconds, state.coverage = stored["seconds"], Coverage.from_dict(stored["coverage"])
        return state

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        stored = {"digest": self.digest, "seconds": self.seconds, "coverage": self.coverage.to_dict()}
        new.write_text(json.dumps(stored))
        new.replace(self.path)


def digest() -> str:
    """Of everything that decides a result."""
    paths = [Path(_C.__file__), *(path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


@contextlib.contextmanager
def progress(state: State, total: int) -> Iterator[Callable[[Coverage], None]]:
    """What to call after each configuration: saves every few seconds, and says how far it is."""
    begin, saved, before = time.monotonic(), time.monotonic(), state.seconds
    first = state.coverage.tokens
    every = 2.0 if sys.stdout.isatty() else 30.0

    def after(coverage: Coverage) -> None:
        nonlocal saved
        now = time.monotonic()
        state.seconds = before + now - begin
        if now - saved >= every or coverage.tokens >= total:
            saved = now
            state.save()
            rate = (coverage.tokens - first) / (now - begin)
            left = max(total - coverage.tokens, 0) / rate / 60
            line = (
                f"{coverage.tokens:,} of {total:,} tokens, {coverage.configurations:,} configurations, "
                f"{rate:,.0f} tokens per second, about {left:.0f} min left"
            )
            print(line, end="  \r" if sys.stdout.isatty() else "\n", flush=True)

    yield after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the configurations")
    parser.add_argument("--jobs", type=int, default=1, help="processes; they share the seed")
    parser.add_argument("--only", type=int, metavar="INDEX", help="run and print this configuration alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and coverage there")
    parser.add_argument("--fresh", action="store_true", help="forget where an earlier run was stopped")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "exactness", help="where it is kept")
    chosen = parser.parse_args()
    torch.set_num_threads(eagle_cuda.num_threads())

    if chosen.only is not None:
        drawn = draw(chosen.seed, chosen.only)
        print(drawn.describe())
        outcome = check(drawn)
        print(outcome.difference or f"equal, {outcome.tokens} tokens")
        return int(outcome.difference is not None)

    state = State.of(chosen.state, chosen.seed, chosen.fresh)
    if state.coverage.configurations:
        print(f"going on after {state.coverage.tokens:,} tokens")
    try:
        with progress(state, chosen.tokens) as after:
            coverage = prove(
                chosen.tokens, seed=chosen.seed, jobs=chosen.jobs, coverage=state.coverage, after_each=after
            )
    except Unequal as error:
        print(f"\n{error}")
        return 1
    print(
        f"\nequal to the bit: {coverage.tokens:,} tokens of {coverage.requests:,} requests in "
        f"{coverage.configurations:,} configurations; {state.seconds / 60:.0f} min"
    )
    million = chosen.tokens >= 1_000_000
    missing = coverage.missing(complete_levels=63 if million else 3, widest=256 if million else 33)
    for line in missing:
        print(f"not covered: {line}")
    if chosen.json:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from timing import write_json

        results = {"seed": chosen.seed, "seconds": round(state.seconds), "unequal": 0, "not_covered": missing}
        write_json(chosen.json, {**results, **coverage.to_dict()})
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
