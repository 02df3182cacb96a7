"""`make gpu-bench`: the benchmarks that have a GPU part, on this machine's GPU.

    python tools/gpu_bench.py [--minutes 8] [--json FILE] [other options of benchmarks/bench_attention.py]

As gpu_check.py, it runs with whatever python and torch the machine has, and builds the module in the same
folder of its own. Without a GPU it says so, and the floors are printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import gpu_check  # noqa: E402

BENCHMARKS = [ROOT / "benchmarks/bench_attention.py"]


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


def main() -> int:
    gpu, words = gpu_check.torch_state()
    print(f"gpu-bench: {words}", flush=True)
    variables = build_module() if gpu else {}
    status = 0
    for benchmark in BENCHMARKS:
        command = [sys.executable, benchmark, "--backend", "cuda", *sys.argv[1:]]
        status = max(status, subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode)
    return status


if __name__ == "__main__":
    sys.exit(main())
