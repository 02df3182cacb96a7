"""Threads: what a job of the CPU pool costs, and what it costs to alternate with torch's own threads.

    python benchmarks/bench_threads.py [--json benchmarks/results/threads.json]

1. Fork and join of an empty job, workers spinning and workers asleep (tests/cpp/thread_cost.cpp, built here).
2. An op of ours right after a torch matmul and the other way round, against each alone, in a process per
   setting of OMP_WAIT_POLICY: two pools that spin against each other on the same cores show here.

Minima and medians of many rounds, interleaved; the machine's own noise is in the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from timing import write_json

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 400


def pool_cost() -> dict[str, float]:
    """Nanoseconds of an empty job by threads and state of the workers."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "thread_cost"
        sources = [ROOT / "csrc/cpu/parallel.cpp", ROOT / "tests/cpp/thread_cost.cpp"]
        flags = ["-std=c++20", "-O2", "-pthread", f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include"]
        subprocess.run([os.environ.get("CXX", "c++"), *flags, *sources, "-o", program], check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    result = {}
    for line in lines[:-1]:
        threads, spinning, asleep = line.split()
        result[f"{threads} threads, workers spinning"] = float(spinning)
        if threads != "1":
            result[f"{threads} threads, workers asleep"] = float(asleep)
    return result


def alternation() -> dict[str, tuple[float, float]]:
    """Microseconds (minimum, median) of our linear and of torch's matmul, alone and right after the other."""
    import torch

    from eagle_cuda.linear import linear, pack_weight

    x = torch.randn(4, 1536, dtype=torch.bfloat16)
    weight = torch.randn(1536, 1536, dtype=torch.bfloat16) / 40
    packed = pack_weight(weight)
    out = torch.empty(4, 1536, dtype=torch.bfloat16)
    a, b, c = torch.randn(192, 256), torch.randn(256, 192), torch.empty(192, 192)

    def ours() -> None:
        linear(x, packed, out=out)

    def theirs() -> None:
        torch.mm(a, b, out=c)

    def timed(first: Callable[[], None] | None, second: Callable[[], None], pause: float) -> float:
        time.sleep(pause)
        if first:
            first()
        begin = time.perf_counter()
        second()
        return (time.perf_counter() - begin) * 1e6

    cases: dict[str, tuple[Callable[[], None] | None, Callable[[], None]]] = {
        "ours after ours": (ours, ours),
        "ours after torch": (theirs, ours),
        "torch after torch": (theirs, theirs),
        "torch after ours": (ours, theirs),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (first, second) in cases.items():
            # Long enough for every thread to fall asleep, so that a case starts from the same state.
            times[name].append(timed(first, second, 0.003))
    return {name: (min(values), statistics.median(values)) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alternation", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alternation:
        print(json.dumps(alternation()))
        return
    result: dict[str, object] = {}
    result["fork and join, ns"] = cost = pool_cost()
    for name, value in cost.items():
        print(f"fork and join, {name:28} | {value / 1000:8.2f} us")
    for policy in ("unset", "passive"):
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), environment.get("PYTHONPATH", "")])
        )
        if policy != "unset":
            environment["OMP_WAIT_POLICY"] = policy
        command = [sys.executable, __file__, "--alternation"]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        result[f"OMP_WAIT_POLICY {policy}, us (min, median)"] = rows = json.loads(done.stdout)
        for name, (least, median) in rows.items():
            print(f"OMP_WAIT_POLICY {policy:8} {name:18} | min {least:8.1f} us | median {median:8.1f} us")
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
