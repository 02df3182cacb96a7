"""What the tests of the benchmarks' GPU parts share: a stand-in for the device that they time on, and the
command itself."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


class StandIn:
    """A device whose time goes on by a millisecond with every call that a graph makes."""

    l2_bytes = 1000

    def __init__(self, works=True):
        self.now, self.log, self.works = 0.0, [], works

    def backlog(self):
        self.log.append("backlog")

    def flush(self):
        self.log.append("flush")

    def synchronize(self):
        self.log.append("synchronize")

    def event(self):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def capture(self, calls):
        def replay():
            self.log.append("replay")
            self.now += len(calls)
            if self.works:
                calls[-1]()

        for call in calls:
            call()
        return replay


def run_benchmark(
    name: str, arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The benchmark's module, run as a command, and the figures that it has written."""
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [name, *arguments.split(), "--json", str(file)])
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            module = runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return module, json.loads(file.read_text())
