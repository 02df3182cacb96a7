"""Arms of the GPU parts: what is timed has given the right result before; cases run until the time is up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from gpu_timing import Arm, Budget, Clock, interleave, prepare
from timing import Samples, paired_ratio

AnyCase = TypeVar("AnyCase")


class WrongResult(Exception):
    pass


class Variant(NamedTuple):
    call: Callable[[int], torch.Tensor]  # works on tensor set i; returns a float tensor of its own
    view: Callable[[torch.Tensor], torch.Tensor] = lambda result: result  # of it, as `Check` takes it


Variants = dict[str, Callable[[], Variant]]  # made one after the other: each may fail
Check = Callable[[torch.Tensor], float]  # how far off set 0's result is; raises WrongResult


def right(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """Largest difference, as a share of the largest value. Raises WrongResult where that is too much."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        raise WrongResult(f"shape {list(got.shape)}, or values that are not finite")
    share = float((got.double() - want).abs().max() / want.abs().max())
    if share > tolerance:
        raise WrongResult(f"differs from float64 by {share:.2e} of the largest value")
    return share


def best_variant(
    clock: Clock, variants: Callable[[], Variants], check: Check, sets: int
) -> tuple[Arm | None, dict[str, object]]:
    """(the fastest variant that gives the right result, what became of each)."""
    best, record, tried = None, {}, {}
    try:
        offered = variants()
    except Exception as error:
        return None, {"error": words(error)}
    for name, make in offered.items():
        try:
            variant = make()
            error = check(variant.view(variant.call(0)))
            arm, seconds = prepare(clock, variant.call, sets)
            arm.result().fill_(math.nan)  # which a graph that does its work replaces
            arm.replay()
            check(variant.view(arm.result()))
        except Exception as error:  # a peer may fail in any way; the run goes on
            tried[name] = words(error)
            torch.cuda.empty_cache()
            continue
        tried[name] = f"{seconds * 1e6:.1f} us"
        if best is None or seconds < best[1]:
            best, record = (arm, seconds), {"variant": name, "error_share": error, "calls": arm.calls}
    record["tried"] = tried
    if best is None:
        record["error"] = "; ".join(f"{name}: {what}" for name, what in tried.items())
        return None, record
    return best[0], record


def words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def time_arms(
    what: object, offered: Mapping[str, Callable[[], Variants]], ours: str,
    check: Callable[[str, torch.Tensor], float], *, clock: Clock, sets: int, rounds: int,
    absent: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict], dict[str, Samples]]:  # fmt: skip
    """(a record of every arm, samples of those that run). `check`: by the arm's name. A wrong result of ours
    ends the run; a peer's failure is noted."""
    arms, records = {}, {}
    for name, make in offered.items():
        if absent and name in absent:
            records[name] = {"error": absent[name]}
            continue
        arm, records[name] = best_variant(clock, make, functools.partial(check, name), sets)
        if arm is not None:
            arms[name] = arm
        elif name == ours and WrongResult.__name__ in str(records[name]["error"]):
            raise SystemExit(f"{what}: {ours}: {records[name]['error']}")
    samples = interleave(clock, arms, rounds=rounds)
    for name, each in samples.items():
        records[name] |= {
            "microseconds": each.median * 1e6,
            "min_microseconds": each.minimum * 1e6,
            "max_microseconds": each.maximum * 1e6,
        }
        if ours in samples and name != ours:
            records[name]["times_ours"] = paired_ratio(each, samples[ours])
    return records, samples


def run_cases(
    cases: Sequence[AnyCase], measure: Callable[[AnyCase], list[dict[str, Any]]],
    named: Callable[[AnyCase], dict[str, Any]], clock: Clock, budget: Budget,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of the cases in turn, until the time is up; a case that fails as a whole gives a row with the
    error, beside what `named` says of it."""
    for number, case in enumerate(cases):
        if not budget.allows():
            left = ", ".join(map(str, cases[number:][:3])) + (", ..." if len(cases) - number > 3 else "")
            progress(f"time is up after {number} of {len(cases)} cases; not run: {left}")
            return
        progress(f"case {number + 1} of {len(cases)}: {case}; {budget.words(len(cases) - number)}")
        try:
            made = measure(case)
        except (RuntimeError, MemoryError) as error:
            made = [{**named(case), "error": words(error)}]
        yield from made
        budget.done()
        try:
            torch.cuda.empty_cache()
            clock.synchronize()
        except RuntimeError as error:  # once a kernel went out of bounds, nothing runs in this process
            progress(f"the device does not answer any more: {words(error)}")
            return
