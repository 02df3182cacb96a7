"""What ptxas says about every CUDA kernel: registers against the budget written beside it, spills, stack.

    python tools/ptxas_report.py [sm_90a ...]     a table per architecture; exit status 1 where one is amiss

Above each kernel stands its budget, `// registers: <= N`. Only device code is compiled here (nvcc -cubin);
the host half is the build's. tests/test_nvcc.py makes tests of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
# As CMakeLists.txt compiles the kernels; every warning of nvcc's own stages is an error.
FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "-Werror=all-warnings"]
JOBS = os.cpu_count() or 1


class CompileError(Exception):
    """nvcc refused the file; the text is its output."""


class Function(NamedTuple):
    """One function of the machine code as `ptxas -v` reports it, a kernel or something that it calls."""

    name: str  # demangled, without parameters
    registers: int | None  # None: not a kernel
    stack: int
    spill_stores: int
    spill_loads: int


class Compiled(NamedTuple):
    source: Path
    arch: str
    functions: list[Function]
    ptx: Path
    cubin: Path
    seconds: float  # of processor time

    @property
    def kernels(self) -> list[Function]:
        return [function for function in self.functions if function.registers is not None]


def nvcc() -> str | None:
    """The compiler that CMake would take (cmake/find_nvcc.cmake)."""
    if os.environ.get("CUDACXX"):
        return shutil.which(os.environ["CUDACXX"])
    homes = [home for home in re.split("[:;]", os.environ.get("CUDA_HOME", "")) if home]
    folders = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def cuda_sources() -> list[Path]:
    """CUDA_SOURCES of CMakeLists.txt."""
    block = re.search(r"set\(CUDA_SOURCES(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.S)
    if block is None:
        raise SystemExit("CMakeLists.txt: expected set(CUDA_SOURCES ...), found none")
    return [ROOT / path for path in re.findall(r"\S+\.cu\b", block.group(1))]


# ---- the budgets ---------------------------------------------------------------------------------


def included(path: Path) -> list[Path]:
    """`path` and the files of csrc/cuda that it includes, however deep."""
    found, waiting = [], [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        names = re.findall(r'^\s*#\s*include\s*"(cuda/[^"]+)"', file.read_text(), re.M)
        waiting += [CSRC / name for name in names if (CSRC / name).is_file()]
    return found


def kernels_of(text: str) -> dict[str, int | None]:
    """Name -> budget of every kernel that is defined in `text`; None where no budget stands above it."""
    found = {}
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if "__global__" not in line.partition("//")[0]:
            continue
        head = " ".join(part.partition("//")[0] for part in lines[i : i + 8])
        head = re.sub(r"__launch_bounds__\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", " ", head)
        if re.match(r"[^{]*;", head):  # a declaration, an explicit instantiation
            continue
        name = re.search(r"__global__[\w\s]*?\b(\w+)\s*\(", head)
        if name is None:
            raise CompileError(f"a kernel whose name could not be read: {line.strip()}")
        budget = None
        for above in reversed(lines[:i]):
            if not above.strip() or above.rstrip().endswith((";", "}", "{")):
                break
            stated = re.search(r"//\s*registers:\s*<=\s*(\d+)", above)
            budget = int(stated.group(1)) if stated and budget is None else budget
        found[name.group(1)] = budget
    return found


def budgets(path: Path) -> dict[str, int | None]:
    """Name -> budget of the kernels in `path` and in what it includes."""
    found: dict[str, int | None] = {}
    for file in included(path):
        found.update(kernels_of(file.read_text()))
    return found


# ---- compiling and reading the report ------------------------------------------------------------


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def without_parameters(name: str) -> str:
    """`void f<float>(int)` -> `f<float>`, namespaces dropped."""
    name = name.replace("(anonymous namespace)::", "")
    depth, end = 0, len(name)
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = i
            break
    name = name[:end]
    plain, bracket, arguments = name.partition("<")
    return re.split(r"::| ", plain)[-1] + bracket + arguments


def parse(report: str) -> list[Function]:
    """The functions in the output of `ptxas -v`."""
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    properties = re.findall(rf"Function properties for (\S+)\s*\n\s*{sizes}", report)
    entries = re.findall(
        r"Compiling entry function '([^']+)'.*\n(?:(?!.*Compiling entry).*\n)*?.*Used (\d+) reg", report
    )
    registers = {name: int(number) for name, number in entries}
    missing = set(re.findall(r"Compiling entry function '([^']+)'", report)) - registers.keys()
    if missing or not registers.keys() <= {name for name, *_ in properties}:
        raise CompileError(f"ptxas -v: a report that could not be read\n{report}")
    shown = demangle([name for name, *_ in properties])
    return [
        Function(without_parameters(text), registers.get(name), *map(int, numbers))
        for text, (name, *numbers) in zip(shown, properties)
    ]


def compile_kernels(source: Path, arch: str, folder: Path) -> Compiled:
    """Device code of one file for one architecture, its PTX beside it, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{source.stem}.cubin"
    command = [
        nvcc(),
        *FLAGS,
        f"-I{CSRC}",
        f"-I{CSRC / 'include'}",
        f"-arch={arch}",
        "-Xptxas",
        "-v",
        "-lineinfo",  # for the disassembler; the code is the same
        "-cubin",
    ]
    command += ["--keep", "--keep-dir", folder, source, "-o", cubin]
    log = folder / f"{source.stem}.log"
    with log.open("w") as out:
        process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    report = log.read_text()
    if process.returncode != 0:
        raise CompileError(f"{source.name} for {arch}:\n{report}")
    ptx, seconds = folder / f"{source.stem}.ptx", used.ru_utime + used.ru_stime
    return Compiled(source, arch, parse(report), ptx, cubin, seconds)


def compile_all(sources: list[Path], arch: str, folder: Path) -> dict[Path, Compiled | CompileError]:
    def one(source: Path) -> Compiled | CompileError:
        try:
            return compile_kernels(source, arch, folder / arch / source.stem)
        except CompileError as error:
            return error

    with ThreadPoolExecutor(JOBS) as pool:
        return dict(zip(sources, pool.map(one, sources)))


def faults(compiled: Compiled) -> list[str]:
    """What is amiss, a sentence each: kernel, figure, budget."""
    found = []
    limits = budgets(compiled.source)
    if not compiled.kernels:
        found.append("no kernel in this file")
    for kernel in compiled.kernels:
        limit = limits.get(kernel.name.partition("<")[0])
        if limit is None:
            found.append(
                f"{kernel.name}: {kernel.registers} registers and no budget; "
                f"write `// registers: <= {kernel.registers}` above it"
            )
        elif kernel.registers > limit:
            found.append(f"{kernel.name}: {kernel.registers} registers, budget {limit}")
    for function in compiled.functions:
        if function.stack:
            found.append(f"{function.name}: a stack frame of {function.stack} bytes, expected none")
        if function.spill_stores or function.spill_loads:
            found.append(
                f"{function.name}: spills {function.spill_stores} bytes and reloads {function.spill_loads}, "
                "expected none"
            )
    return found


def main() -> int:
    if nvcc() is None:
        print("nvcc: not found; put it on PATH or set CUDACXX")
        return 0
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in sys.argv[1:] or ["sm_90a"]:
            print(f"{arch}: kernel, registers, budget")
            for source, compiled in compile_all(cuda_sources(), arch, Path(folder)).items():
                if isinstance(compiled, CompileError):
                    print(f"  {compiled}")
                    bad += 1
                    continue
                limits = budgets(source)
                for kernel in compiled.kernels:
                    limit = limits.get(kernel.name.partition("<")[0])
                    print(f"  {kernel.name:60} {kernel.registers:4} {'' if limit is None else limit:>4}")
                for fault in faults(compiled):
                    print(f"  {source.relative_to(ROOT)}: {fault}")
                    bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
