"""Runs the tests over several backends side by side: the CPU backend's output as it comes, then for each pass
over the emulated CUDA kernels a summary line, or the whole output of one that failed.

    python tools/test_passes.py cpu fast checked:1:40         # flavour:seed:preempt
    python tools/test_passes.py cpu=full "checked:1=not full" # pytest's -m for each pass

Arguments after `--` go to pytest. As many passes run at once as there are cores, in the order given: the
longest first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build"
NO_TESTS = 5  # pytest's exit status where nothing was selected


def run_pass(name: str, arguments: list[str]) -> tuple[int, str]:
    """One pass, such as "checked:1:40=full": pytest's exit status and what to print about it."""
    backend, _, marks = name.partition("=")
    return run_cpu(marks, arguments) if backend == "cpu" else run_emulated(backend, marks, arguments)


def run_cpu(marks: str, arguments: list[str]) -> tuple[int, str]:
    """The CPU backend's pass, on the terminal."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", marks, *arguments], cwd=ROOT)
    return done.returncode, f"cpu: {time.monotonic() - begin:.0f} s"


def run_emulated(backend: str, marks: str, arguments: list[str]) -> tuple[int, str]:
    flavour, seed, preempt = (*backend.split(":"), "0", "0")[:3]
    options = ["--backend", "simt", "--simt", flavour, "--seed", seed, "--preempt", preempt]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "-m", marks, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - begin
    (LOGS / (re.sub("[: ]", "_", f"{backend} {marks}".strip()) + ".log")).write_text(done.stdout)
    title = f"simt {flavour}, seed {seed}" + (f", preempt {preempt}" if preempt != "0" else "")
    title += f" ({marks})" if marks else ""
    if done.returncode == NO_TESTS and arguments:
        return 0, f"{title}: no test selected"
    if done.returncode != 0:
        return done.returncode, f"{done.stdout}\n{title}: FAILED in {seconds:.0f} s"
    summary = re.sub(r" in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1])
    return 0, f"{title}: {summary} in {seconds:.0f} s"


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    passes, arguments = words[:split], words[split + 1 :]
    LOGS.mkdir(exist_ok=True)
    worst = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for future in [pool.submit(run_pass, name, arguments) for name in passes]:
            code, text = future.result()
            print(text, flush=True)
            worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
