"""Timing on a GPU: CUDA graphs between events, behind a backlog, with a cold cache; the machine's ceilings.

An event pair on an idle GPU would time the host as well. So every round first occupies the GPU for a while,
and the host queues all arms of the round behind that. Before each arm the cache on the chip is filled with
something else, by reading it, so that nothing has to be written back meanwhile; within an arm's graph every
call works on tensors of its own until these come to several times that cache.
Clocks are the machine's: arms take turns, and begin in another order every round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from ceilings import Ceilings
from timing import Samples

BACKLOG_CYCLES = 4_000_000  # about 2 ms
COLD = 5  # times the cache on the chip: as much memory goes by before a call meets its tensors again
GRAPH_SECONDS = (
    0.5e-3  # that the calls of a graph should take together, so that its launch is small beside them
)
MAX_CALLS = 512

Call = Callable[[int], object]  # works on tensor set i


class Event(Protocol):
    def record(self) -> None: ...
    def elapsed_time(self, end: Event) -> float: ...  # milliseconds


class Clock(Protocol):
    """What the timing needs of a device; the tests have a stand-in."""

    l2_bytes: int

    def backlog(self) -> None: ...
    def flush(self) -> None: ...
    def event(self) -> Event: ...
    def synchronize(self) -> None: ...
    def capture(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]: ...


class CudaClock:
    """The current CUDA device."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = int(properties.L2_cache_size)
        self._scratch = torch.zeros(self.l2_bytes // 2, dtype=torch.float32, device="cuda")  # twice its size
        self._sink = torch.empty((), dtype=torch.float32, device="cuda")

    def backlog(self) -> None:
        torch.cuda._sleep(BACKLOG_CYCLES)

    def flush(self) -> None:
        torch.sum(self._scratch, dim=0, out=self._sink)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        torch.cuda.synchronize()
        return graph.replay


class Arm(NamedTuple):
    replay: Callable[[], object]
    calls: int  # that one replay makes
    call: Call  # holds the memory that the graph works on
    result: Callable[[], Any]  # what the graph's last call returned: that of set 0


def capture(clock: Clock, call: Call, sets: int, calls: int) -> Arm:
    """A graph of so many calls that go round the tensor sets, to end with set 0."""
    results: list[object] = []

    def last() -> None:
        results[:] = [call(0)]

    functions = [lambda i=i: call(i % sets) for i in range(calls - 1, 0, -1)]
    return Arm(clock.capture([*functions, last]), calls, call, lambda: results[0])


def interleave(clock: Clock, arms: Mapping[str, Arm], *, rounds: int, warmup: int = 2) -> dict[str, Samples]:
    """Seconds of a call: every arm once a round, in turn."""
    names, samples = list(arms), {name: Samples() for name in arms}
    for round_ in range(-warmup, rounds):
        first = round_ % max(len(names), 1)
        events = []
        clock.backlog()
        for name in names[first:] + names[:first]:
            begin, end = clock.event(), clock.event()
            clock.flush()
            begin.record()
            arms[name].replay()
            end.record()
            events.append((name, begin, end))
        clock.synchronize()
        if round_ >= 0:
            for name, begin, end in events:
                samples[name].rounds.append([begin.elapsed_time(end) * 1e-3 / arms[name].calls])
    return samples


def prepare(clock: Clock, call: Call, sets: int) -> tuple[Arm, float]:
    """A graph of a useful length, and about how long a call takes."""
    trial = capture(clock, call, sets, min(sets, 4))
    seconds = interleave(clock, {"": trial}, rounds=3, warmup=1)[""].median
    calls = min(max(round(GRAPH_SECONDS / max(seconds, 1e-7)), 1), MAX_CALLS)
    return capture(clock, call, sets, calls), seconds


# ---- what this device can do -------------------------------------------------------------------------


def read_candidates(words: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to read an int32 vector of 2^n words and do next to nothing else."""
    floats = words.view(torch.float32)
    found: dict[str, Callable[[], object]] = {"torch.sum": lambda: floats.sum()}
    try:
        from gpu_read import xor_words
    except ImportError:
        return found
    for programs in (4096, 16384):
        for block in (2048, 4096, 8192):
            if words.numel() % (programs * block) == 0:
                out = torch.empty(programs, dtype=torch.int32, device=words.device)
                found[f"Triton, {programs} x {block}"] = lambda p=programs, b=block, o=out: xor_words(
                    words, p, b, o
                )
    return found


def check_read(words: torch.Tensor) -> None:
    """xor_words really reads every word."""
    try:
        from gpu_read import xor_words
    except ImportError:
        return
    out = torch.empty(4, dtype=torch.int32, device=words.device)
    part = words[:8192]
    xor_words(part, 4, 1024, out)
    want = part.clone()
    while want.numel() > 4:  # halves of each program's share on one another
        shares = want.view(4, 2, -1)
        want = (shares[:, 0] ^ shares[:, 1]).flatten()
    if not torch.equal(out, want):
        raise SystemExit(f"the read kernel: expected {want.tolist()}, got {out.tolist()}")


def measure_ceilings(
    clock: Clock, device: torch.device, *, log2_words: int = 29, size: int = 8192, rounds: int = 10
) -> tuple[Ceilings, dict[str, object]]:
    """(rates of a plain read and of a bf16 matrix product, how they and others were found)."""
    words = torch.randint(-(2**31), 2**31 - 1, (2**log2_words,), dtype=torch.int32, device=device)
    check_read(words)
    details: dict[str, object] = {}
    reads = {}
    for name, function in read_candidates(words).items():
        function()
        reads[name] = capture(clock, lambda i, f=function: f(), 1, 1)
    times = interleave(clock, reads, rounds=rounds)
    best = min(times, key=lambda name: times[name].median)
    read = words.nbytes / times[best].median
    target = torch.empty_like(words)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    others = {
        "copy": lambda i: target.copy_(words),
        "matmul": lambda i: torch.mm(a, b, out=product),
    }
    for function in others.values():
        function(0)
    small = torch.zeros(1, device=device)
    small.add_(1)
    arms = {name: capture(clock, function, 1, 4) for name, function in others.items()}
    arms["node"] = capture(clock, lambda i: small.add_(1), 1, MAX_CALLS)
    found = interleave(clock, arms, rounds=rounds)
    operations = 2 * size**3 / found["matmul"].median
    details["read_gigabytes_per_second"] = {
        name: words.nbytes / each.median / 1e9 for name, each in times.items()
    }
    details["copy_gigabytes_per_second"] = 2 * words.nbytes / found["copy"].median / 1e9
    details["matmul_teraflops"] = operations / 1e12
    details["graph_node_microseconds"] = found["node"].median * 1e6
    return Ceilings(f"measured in this run: {best}; {size}^3 bf16 matrix product", read, operations), details


# ---- how long it may take ----------------------------------------------------------------------------


class Budget:
    """Whether another case fits into the time given, by what those before it took."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic):
        self._clock, self._begin = clock, clock()
        self._limit = float("inf") if minutes is None else 60 * minutes
        self._taken: list[float] = []
        self._last = 0.0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begin

    @property
    def expected(self) -> float:
        """Seconds of another case: the mean of the last few, later ones being larger than earlier ones."""
        return statistics.fmean(self._taken[-4:]) if self._taken else 0.0

    def allows(self) -> bool:
        self._last = self.elapsed
        return self._last + self.expected <= self._limit

    def done(self) -> None:
        """The case that was last allowed has ended."""
        self._taken.append(self.elapsed - self._last)

    def words(self, left: int) -> str:
        """How far, and how long still for so many cases."""
        limit = "" if self._limit == float("inf") else f" of {self._limit / 60:.1f}"
        rest = f", about {self.expected * left / 60:.1f} for all that is left" if self._taken else ""
        return f"{self.elapsed / 60:.1f}{limit} min{rest}"
