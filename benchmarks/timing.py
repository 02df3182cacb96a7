"""Timing shared by the benchmarks, made for a machine that others use too.

Arms are run in turn, so that a slow minute slows all of them. An arm may be cut into pieces (one per matrix,
say): the sum of the pieces' minima needs an undisturbed moment per piece, not an undisturbed second in all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

import eagle_cuda

LOG_WIDTH = 170  # of the tables where there is no terminal to fit them into


@dataclass
class Samples:
    """Seconds of one arm: `rounds[i][j]` is piece j in round i."""

    rounds: list[list[float]] = field(default_factory=list)

    @property
    def minimum(self) -> float:
        """Sum over the pieces of each one's fastest round: the arm undisturbed."""
        return sum(min(piece) for piece in zip(*self.rounds))

    @property
    def median(self) -> float:
        """Median over the rounds of the whole arm: the arm as this machine was."""
        return statistics.median(sum(pieces) for pieces in self.rounds)

    @property
    def maximum(self) -> float:
        """The arm's slowest round."""
        return max(sum(pieces) for pieces in self.rounds)


def ratio(a: Samples, b: Samples) -> float:
    """How many times as long `a` takes as `b`, undisturbed."""
    return a.minimum / b.minimum


def paired_ratio(a: Samples, b: Samples) -> float:
    """Median over the rounds of a's time through b's: each round saw both under the same load."""
    return statistics.median(sum(x) / sum(y) for x, y in zip(a.rounds, b.rounds))


def interleave(
    arms: dict[str, Callable[[], object] | Sequence[Callable[[], object]]], *, rounds: int, warmup: int = 1
) -> dict[str, Samples]:
    """Times every arm once a round, in turn. An arm is a function, or a list of functions: its pieces."""
    pieces = {name: [arm] if callable(arm) else list(arm) for name, arm in arms.items()}
    samples = {name: Samples() for name in arms}
    clock = time.perf_counter
    for round_ in range(-warmup, rounds):
        for name, functions in pieces.items():
            times = []
            for function in functions:
                start = clock()
                function()
                times.append(clock() - start)
            if round_ >= 0:
                samples[name].rounds.append(times)
    return samples


def parser(doc: str, *, rounds: int | None) -> argparse.ArgumentParser:
    """The command line of a benchmark: the first line of its docstring, --rounds and --json."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return made


def parse_for_backend(
    line: argparse.ArgumentParser, defaults: Mapping[str, Mapping[str, object]], what: str
) -> argparse.Namespace:
    """The options of a benchmark with a GPU part: what stays None is the default of its --backend, which
    `line` has already. Adds --floors, of `what`, and --ceilings.
    """
    line.add_argument("--floors", action="store_true", help=f"print the floors of the GPU's {what} only")
    line.add_argument(
        "--ceilings", type=float, nargs=2, metavar=("GB/S", "TFLOP/S"), help="rates for --floors"
    )
    options = line.parse_args()
    if options.floors or (options.backend is None and torch.cuda.is_available()):
        options.backend = "cuda"
    options.backend = options.backend or "cpu"
    for name, value in defaults[options.backend].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def start() -> Console:
    """Seeds torch, gives it as many threads as ours has, and prints what figures depend on."""
    torch.manual_seed(0)
    torch.set_num_threads(eagle_cuda.num_threads())
    console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
    console.print(environment(), highlight=False)
    return console


def environment() -> dict[str, object]:
    """What a figure depends on: processors, instruction set, threads, load, versions, commit."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit.stdout.strip() or None,
        **eagle_cuda.build_info(),
    }


def _processor() -> str:
    """Name, family and model: a virtual machine may hide the name."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def write_json(path: Path, results: object) -> None:
    """`results` beside the environment they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")
