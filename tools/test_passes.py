"""Runs the tests over several backends side by side: the CPU backend's output as it comes, then for each pass
over the emulated CUDA kernels a summary line, or the whole output of one that failed.

    python tools/test_passes.py cpu fast checked:1            # `make test`: checked with one random schedule
    python tools/test_passes.py cpu checked:1:40 checked:2:40 # flavour:seed:preempt

Arguments after `--` go to pytest.
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


def run_cpu(arguments: list[str]) -> int:
    """The CPU backend's pass, on the terminal: pytest's exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT).returncode


def run_emulated(name: str, arguments: list[str]) -> tuple[int, str]:
    """One pass, such as "checked:1:40": pytest's exit status and what to print about it."""
    flavour, seed, preempt = (*name.split(":"), "0", "0")[:3]
    options = ["--backend", "simt", "--simt", flavour, "--seed", seed, "--preempt", preempt]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - begin
    (LOGS / f"{name.replace(':', '_')}.log").write_text(done.stdout)
    title = f"simt {flavour}, seed {seed}" + (f", preempt {preempt}" if preempt != "0" else "")
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
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, cores - ("cpu" in passes))) as pool:
        emulated = [pool.submit(run_emulated, name, arguments) for name in passes if name != "cpu"]
        worst = run_cpu(arguments) if "cpu" in passes else 0
        for future in emulated:
            code, text = future.result()
            print(text, flush=True)
            worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
