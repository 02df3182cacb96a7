"""`make gpu-bench`: the benchmarks that have a GPU part, on this machine's GPU.

    python tools/gpu_bench.py [--minutes 8] [--json FOLDER] [--only linear draft attention]
    python tools/gpu_bench.py --only attention [options of benchmarks/bench_attention.py]

Of the minutes each benchmark gets a share, and the next ones what it leaves. FOLDER receives linear.json,
draft.json and attention.json, whatever else happens. As gpu_check.py, it runs with whatever python and torch
the machine has, and builds the module in the same folder of its own. Without a GPU it says so, and the floors
are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import gpu_check  # noqa: E402

# In this order, with so many of 8 minutes: products first, which the draft phase is made of.
SHARES = {"linear": 3.0, "draft": 2.5, "attention": 2.5}


def build_module() -> dict[str, str]:
    """The environment in which eagle_cuda is the module built for this GPU."""
    tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    build = ROOT / "build" / f"gpu-check-{tag}"
    build.mkdir(parents=True, exist_ok=True)
    checks = gpu_check.Checks()
    architectures = f"{gpu_check.architecture()}-real"
    checks.check("build: configure", gpu_check.configure, checks, build, architectures)
    if not checks.check("build: module", gpu_check.build_target, checks, build, "_C"):
        raise SystemExit(gpu_check.table(checks.rows))
    return gpu_check.extension(build)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """(our options, those of the only benchmark)."""
    line = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    line.add_argument("--minutes", type=float, help="for all of them together")
    line.add_argument("--json", type=Path, metavar="FOLDER", help="also write the figures there")
    line.add_argument("--only", nargs="+", choices=list(SHARES), default=list(SHARES))
    options, rest = line.parse_known_args()
    if rest and len(options.only) > 1:
        line.error(f"{' '.join(rest)}: expected --only and one benchmark before its options")
    return options, rest


def main() -> int:
    options, rest = parse()
    gpu, words = gpu_check.torch_state()
    print(f"gpu-bench: {words}", flush=True)
    variables = build_module() if gpu else {}
    status, begin = 0, time.monotonic()
    left = [name for name in SHARES if name in options.only]
    while left:
        name = left[0]
        command = [sys.executable, ROOT / f"benchmarks/bench_{name}.py", "--backend", "cuda", *rest]
        if options.minutes is not None:
            minutes = options.minutes - (time.monotonic() - begin) / 60
            share = SHARES[name] / sum(SHARES[other] for other in left)
            command += ["--minutes", f"{max(minutes, 0) * share:.2f}"]
        if options.json:
            command += ["--json", options.json / f"{name}.json"]
        print(f"== {name}", flush=True)
        status = max(status, subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode)
        left.pop(0)
    return status


if __name__ == "__main__":
    sys.exit(main())
