"""`make gpu-check`: whether the CUDA kernels do on this machine's GPU what they do under the emulator.

    python tools/gpu_check.py [--json FILE] [--build FOLDER] [--rehearse]

Runs with whatever python and torch the machine has and fetches nothing: builds the module in a folder of its
own, compares every wrapper of csrc/cuda/device with plain C++ and with its emulated twin and tells planted
faults, runs the op tests with --backend cuda and the ops in captured CUDA graphs, and where compute-sanitizer
works, a short selection under it. One table at the end; exit status 1 where something failed. Without a GPU
it says so and looks at what it can. --rehearse: the same steps with the CPU in the place of the GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import ptxas_report  # noqa: E402

SECONDS = 350  # for everything together
PROBE_SECONDS = 10  # for compute-sanitizer to report a planted fault
OK, FAILED, ABSENT = "ok", "FAILED", "not available"
NO_TIME = "no time left"
GPU_TESTS = ROOT / "tests/gpu"
PLANTED = r"planted: .+: word \d+: expected [0-9a-f]{8}, got [0-9a-f]{8}"  # what ptx_conformance says of one
A_FEW_TESTS = [ROOT / "tests/test_verify.py", ROOT / "tests/test_tree.py"]  # enough for a rehearsal


class Row(NamedTuple):
    check: str
    state: str
    seconds: float
    detail: str


class Done(NamedTuple):
    status: int | None  # None: it ran out of time
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}, no output"


class NotAvailable(Exception):
    """What this machine lacks for a check."""


class Failed(Exception):
    """What went wrong, in a line; the output is printed above the table."""

    def __init__(self, what: str, output: str = ""):
        super().__init__(what)
        self.output = output


class Checks:
    """The checks so far, and the time that is left."""

    def __init__(self, seconds: float = SECONDS):
        self.rows: list[Row] = []
        self.deadline = time.monotonic() + seconds

    def left(self, wanted: float) -> float:
        """The seconds that are left, if they are as many as wanted."""
        if (left := self.deadline - time.monotonic()) < wanted:
            raise NotAvailable(NO_TIME)
        return left

    def run(self, command: list[Any], limit: float, **environment: str) -> Done:
        """A command, stopped with everything that it started at `limit` seconds or when no time is left."""
        begin = time.monotonic()
        left = min(limit, self.left(1))
        process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=ROOT, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=left)
            return Done(process.returncode, output, time.monotonic() - begin)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return Done(None, output, time.monotonic() - begin)

    def must(self, command: list[Any], limit: float, **environment: str) -> str:
        """The output of a command that succeeds."""
        done = self.run(command, limit, **environment)
        if done.status is None:
            raise Failed(f"not done after {done.seconds:.0f} s", done.output)
        if done.status != 0:
            raise Failed(done.last_line, done.output)
        return done.output

    def check(self, name: str, function: Callable[..., str], *args: Any) -> bool:
        """Runs one check, which returns what it found, and notes the outcome."""
        print(f"{name} ...", flush=True)
        begin = time.monotonic()
        try:
            state, detail = OK, function(*args)
        except NotAvailable as reason:
            state, detail = ABSENT, str(reason)
        except Failed as failure:
            print(failure.output[-6000:])
            state, detail = FAILED, str(failure)
        self.rows.append(Row(name, state, round(time.monotonic() - begin, 1), detail))
        return state == OK


def table(rows: list[Row]) -> str:
    width = max(len(row.check) for row in rows)
    return "\n".join(
        f"{row.check:{width}}  {row.state:13}  {row.seconds:6.1f} s  {row.detail[:110]}" for row in rows
    )


# ---- what stands here ------------------------------------------------------------------------------


def module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def torch_state() -> tuple[bool, str]:
    """(whether torch sees a GPU, in words)."""
    if not module("torch"):
        return False, f"{sys.executable} has no torch"
    import torch

    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no GPU"
    return True, f"torch {torch.__version__}, {torch.cuda.get_device_name()}"


def architecture() -> str:
    """That of the GPU which torch uses, such as 90a."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"  # as cmake/cuda_architectures.cmake spells it


def environment() -> dict[str, Any]:
    """What the outcome depends on."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform()}
    if module("torch"):
        import torch

        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
            found["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    for key, command in {
        "driver": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "nvcc": [ptxas_report.nvcc() or "nvcc", "--version"],
        "commit": ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
    }.items():
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True)
            lines = done.stdout.strip().splitlines()
            found[key] = lines[-1] if done.returncode == 0 and lines else None
    return found


# ---- the checks ------------------------------------------------------------------------------------


def nvcc_gate(checks: Checks, arch: str) -> str:
    if ptxas_report.nvcc() is None:
        raise NotAvailable("nvcc was not found; put it on PATH or set CUDACXX")
    checks.left(60)  # nothing stops it then
    with tempfile.TemporaryDirectory() as folder:
        results = ptxas_report.compile_all(ptxas_report.cuda_sources(), arch, Path(folder))
        errors = [str(each) for each in results.values() if isinstance(each, ptxas_report.CompileError)]
        compiled = [each for each in results.values() if isinstance(each, ptxas_report.Compiled)]
        faults = [f"{each.source.name}: {fault}" for each in compiled for fault in ptxas_report.faults(each)]
    if errors or faults:
        raise Failed((errors + faults)[0].splitlines()[0], "\n".join(errors + faults))
    kernels = sum(len(each.kernels) for each in compiled)
    return f"{kernels} kernels within their register budgets, no spill, no stack frame"


def configure(checks: Checks, build: Path, architectures: str) -> str:
    """A build folder for the module and the emulator; nothing where there is one already."""
    if (build / "CMakeCache.txt").is_file():
        return f"as it is: {build.name}"
    for tool in ("cmake", os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            raise NotAvailable(f"{tool} was not found")
    if not module("pybind11"):
        raise NotAvailable(f"{sys.executable} has no pybind11")
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "EAGLE_CUDA": "ON",
        "EAGLE_CUDA_ARCHITECTURES": architectures,
        "EAGLE_SIMT": "ON",
        "EAGLE_WERROR": "OFF",  # a compiler that nobody has tried yet may warn
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    checks.must(["cmake", "-S", ROOT, "-B", build, "-G", generator, *options], 60)
    return f"{generator}, {architectures or 'for this machine'}"


def build_target(checks: Checks, build: Path, target: str) -> str:
    if not (build / "CMakeCache.txt").is_file():
        raise NotAvailable("no build folder")
    checks.must(["cmake", "--build", build, "--target", target, "--parallel", str(os.cpu_count() or 2)], 200)
    return target


def extension(build: Path) -> dict[str, str]:
    """The environment in which eagle_cuda is the module of this build."""
    path = build / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    folders = os.pathsep.join(str(ROOT / folder) for folder in (".", "python", "tests"))
    return {"PYTHONPATH": folders, **({"EAGLE_CUDA_EXTENSION": str(path)} if path.is_file() else {})}


def compile_conformance(checks: Checks, program: Path) -> str:
    """ptx_conformance for the GPU: the kernels and cases that the emulated one has, over the CUDA runtime."""
    sources = [*GPU_TESTS.glob("*_conformance.cu"), GPU_TESTS / "conformance_main.cpp"]
    sources += [GPU_TESTS / "device_cuda.cpp", ROOT / "csrc/cuda/launch.cpp", ROOT / "csrc/cuda/driver.cpp"]
    flags = ["-std=c++20", "-O3", "-fmad=false", "-Xcompiler=-ffp-contract=off", f"-arch=sm_{architecture()}"]
    flags += [f'-DEAGLE_CUDA_ARCHITECTURES="{architecture()}"', '-DEAGLE_CUDA_TOOLKIT=""']
    folders = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include", "tests/gpu")]
    checks.must([ptxas_report.nvcc(), *flags, *folders, *sources, "-o", program], 120)
    return program.name


def conformance(checks: Checks, program: Path) -> str:
    """Every case against plain C++."""
    if not program.is_file():
        raise NotAvailable("it was not built")
    output = checks.must([program], 60)
    (program.parent / f"{program.name}.txt").write_text(output)
    return f"{len(output.splitlines())} cases as plain C++ has them"


def planted(checks: Checks, program: Path) -> str:
    """Every case over an instruction with a fault: each must be told."""
    if not program.is_file():
        raise NotAvailable("it was not built")
    done = checks.run([program, "planted"], 60)
    lines = done.output.splitlines()
    for line in lines or [done.last_line]:
        if not re.fullmatch(PLANTED, line):
            raise Failed(f"expected a planted fault that is told, got: {line}", done.output)
    if done.status != 1:
        raise Failed(f"expected exit status 1, got {done.status}", done.output)
    return f"{len(lines)} planted faults, each told"


def twins(program: Path, emulated: Path) -> str:
    """The lines of both programs, checksums included."""
    logs = [path.parent / f"{path.name}.txt" for path in (program, emulated)]
    for log in logs:
        if not log.is_file():
            raise NotAvailable(f"no output of {log.stem}")
    lines = [log.read_text().splitlines() for log in logs]
    for here, there in zip(*lines):
        if here != there:
            raise Failed(f"GPU: {here}; emulator: {there}")
    if len(lines[0]) != len(lines[1]):
        raise Failed(f"{len(lines[0])} cases on the GPU, {len(lines[1])} under the emulator")
    return f"{len(lines[0])} cases with equal bits"


def pytest_run(checks: Checks, arguments: list[Any], variables: dict[str, str], limit: float) -> str:
    for name in ("pytest", "hypothesis"):
        if not module(name):
            raise NotAvailable(f"{sys.executable} has no {name}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    output = checks.must(command, limit, **variables)
    summary = output.strip().splitlines()[-1].strip("= ")
    if not re.search(r"\b[1-9]\d* passed", summary):
        raise Failed(f"expected tests that pass, got: {summary}", output)
    return summary


def run_cases(checks: Checks, device: str, variables: dict[str, str], prefix: list[Any], limit: float) -> str:
    output = checks.must([*prefix, sys.executable, "-m", "gpu.run_cases", device], limit, **variables)
    good = re.findall(r"^\w+: ok$", output, re.M)
    return f"{len(good)} ops give the bits of the CPU backend"


def sanitizer_works(checks: Checks, folder: Path) -> str:
    """A planted write out of bounds and a planted race, which must be reported."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise NotAvailable("compute-sanitizer was not found")
    probe = folder / "sanitizer_probe"
    checks.must(
        [ptxas_report.nvcc(), f"-arch=sm_{architecture()}", GPU_TESTS / "sanitizer_probe.cu", "-o", probe], 60
    )
    for kind, words in (("memcheck", "Invalid __global__ write"), ("racecheck", "hazard")):
        done = checks.run([tool, "--tool", kind, "--error-exitcode", "9", probe, kind], PROBE_SECONDS)
        if done.status != 9 or words not in done.output:
            raise NotAvailable(f"{kind} does not report a planted fault: {done.last_line}")
    return tool


# ---- all of them -----------------------------------------------------------------------------------


def with_gpu(checks: Checks, build: Path, rehearse: bool) -> None:
    """Every check. In a rehearsal, the CPU and the emulator stand in for the GPU."""
    build.mkdir(parents=True, exist_ok=True)
    emulated = build / "ptx_conformance"
    program = emulated if rehearse else build / "ptx_conformance_gpu"
    device = "cpu" if rehearse else "cuda"
    checks.check("build: configure", configure, checks, build, "" if rehearse else f"{architecture()}-real")
    built = checks.check("build: module", build_target, checks, build, "_C")
    variables = extension(build)
    if not rehearse:
        checks.check("build: wrappers, GPU", compile_conformance, checks, program)
    checks.check("build: wrappers, emulator", build_target, checks, build, "ptx_conformance")
    checks.check("wrappers on the GPU", conformance, checks, program)
    checks.check("wrappers under the emulator", conformance, checks, emulated)
    checks.check("wrappers: GPU = emulator", twins, program, emulated)
    checks.check("planted faults on the GPU", planted, checks, program)
    backend = ["-p", "gpu.rehearsal"] if rehearse else ["--backend", "cuda"]
    tests = [*backend, "-m", "not full", f"--ignore={GPU_TESTS}", *(A_FEW_TESTS if rehearse else [])]
    ops: dict[str, Callable[[], str]] = {
        "ops, one call each": lambda: run_cases(checks, device, variables, [], 60),
        "ops in CUDA graphs": lambda: pytest_run(checks, [*backend, GPU_TESTS], variables, 60),
        "op tests": lambda: pytest_run(checks, tests, variables, 150),
    }
    for name, function in ops.items():
        checks.check(name, function if built else lambda: missing("the module was not built"))
    if rehearse:
        return
    if checks.check("compute-sanitizer: probe", sanitizer_works, checks, build):
        tool = checks.rows[-1].detail
        for kind in ("memcheck", "racecheck", "synccheck"):
            prefix = [tool, "--tool", kind, "--error-exitcode", "9"]
            checks.check(
                f"{kind}: wrappers", lambda p=prefix: checks.must([*p, program], 40).splitlines()[-1]
            )
            if built:
                checks.check(f"{kind}: ops", run_cases, checks, device, variables, prefix, 60)


def missing(what: str) -> str:
    raise NotAvailable(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also writes the outcome to this file")
    parser.add_argument("--build", type=Path, help="a build folder to use as it is, not one of its own")
    parser.add_argument("--rehearse", action="store_true", help="with the CPU in the place of the GPU")
    options = parser.parse_args()
    checks = Checks()
    tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    gpu, words = torch_state()
    print(f"gpu-check: {words}")
    if gpu or options.rehearse:
        with_gpu(checks, options.build or ROOT / "build" / f"gpu-check-{tag}", options.rehearse)
    else:
        emulated = (options.build or ROOT / "build" / tag) / "ptx_conformance"
        checks.check("wrappers under the emulator", conformance, checks, emulated)
        checks.check("planted faults under the emulator", planted, checks, emulated)
    for arch in () if options.rehearse else ("sm_90a", "sm_80"):  # last: it needs no GPU
        checks.check(f"nvcc gate, {arch}", nvcc_gate, checks, arch)
    print(f"\n{table(checks.rows)}")
    if options.rehearse:
        print("A rehearsal: nothing ran on a GPU.")
    elif not gpu:
        needs = "a GPU, nvcc, cmake, and a python with pybind11, pytest and a torch that sees the GPU"
        print(f"No GPU was checked: that needs {needs}; {words}.")
    if options.json:
        outcome = {"environment": environment(), "rehearsal": options.rehearse, "gpu": gpu}
        outcome["results"] = [row._asdict() for row in checks.rows]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(outcome, indent=2) + "\n")
    return int(gpu and any(row.state == FAILED or row.detail == NO_TIME for row in checks.rows))


if __name__ == "__main__":
    sys.exit(main())
