"""The arrows of the architecture, held by reading the sources: who may include or import whom, and how long
a file may be.

include <- common <- {cpu, cuda};  ops -> {cpu, cuda} through include;  bindings -> ops through include
common <- cuda/device <- cuda;  tests/simt stands in for CUDA's headers, and csrc knows nothing of it
eagle_cuda -> bindings;  eagle_decode -> eagle_cuda's public ops;  tests/reference -> nothing of ours
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
MAX_LINES = 400
MAX_TEST_LINES = 600  # tables of cases are long, not deep


def files(folder: str, *suffixes: str) -> list[Path]:
    """The project's own files below `folder` with one of the suffixes, by path."""
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if "__pycache__" not in path.parts)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


CPP = files("csrc", ".h", ".cpp", ".cu", ".cuh")
SIMT = files("tests/simt", ".h", ".cpp", ".cu", ".cuh")
PYTHON = [
    path
    for folder in ("eagle_cuda", "python", "tests", "benchmarks", "tools")
    for path in files(folder, ".py")
]

# room -> prefixes of quoted includes that it may use; a folder of its own before the room around it
MAY_INCLUDE = {
    "cuda/device": ("common/", "cuda/device/"),
    "include": ("eagle_cuda/",),
    "common": ("eagle_cuda/", "common/"),
    "cpu": ("eagle_cuda/", "common/", "cpu/"),
    "cuda": ("eagle_cuda/", "common/", "cuda/"),
    "ops": ("eagle_cuda/", "common/", "ops/"),
    "bindings": ("eagle_cuda/", "common/", "bindings/", "pybind11/"),
}
# Angle-bracket includes beyond the C++ standard library, by file or room.
SYSTEM = {
    "csrc/cpu/parallel.cpp": {"pthread.h", "sched.h"},
    "csrc/cuda": {"cuda_runtime.h"},  # what tests/simt stands in for
    "csrc/bindings": {"pybind11/pybind11.h", "pybind11/stl.h", "cxxabi.h", "unistd.h"},
}
INTRINSICS = re.compile(r"_(avx2|avx512|avx512_bf16)\.(cpp|h)$")
PTX = ("csrc/cuda/device/ptx.cuh", "csrc/cuda/device/ptx_matrix.cuh")


def includes(path: Path) -> list[tuple[str, str]]:
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.M)


@pytest.mark.parametrize("path", CPP, ids=short)
def test_includes(path):
    relative = str(path.relative_to(CSRC))
    room = next((room for room in MAY_INCLUDE if relative.startswith(f"{room}/")), None)
    assert room, f"{short(path)}: csrc has no such room"
    extra = {name for prefix, names in SYSTEM.items() if short(path).startswith(prefix) for name in names}
    for bracket, name in includes(path):
        if bracket == '"':
            assert name.startswith(MAY_INCLUDE[room]), (
                f"{short(path)} includes {name}: {room} must not know it"
            )
            base = CSRC / "include" if name.startswith("eagle_cuda/") else CSRC
            assert (base / name).is_file(), f"{short(path)} includes {name}: write the path from csrc"
        elif name == "immintrin.h":
            assert room == "cpu", f"{short(path)} includes {name}"
        else:
            assert re.fullmatch(r"[a-z_0-9]+", name) or name in extra, f"{short(path)} includes <{name}>"
        assert not re.match(r"(torch|ATen|c10|Python\.h)", name), f"{short(path)} includes {name}"


@pytest.mark.parametrize("path", CPP, ids=short)
def test_preprocessor(path):
    # What differs between builds is another object file, never an #ifdef.
    allowed = {
        "csrc/common/numeric.h",
        "csrc/cpu/isa.cpp",
        "csrc/cpu/parallel.cpp",
        *PTX,
    }
    text = path.read_text()
    if short(path) not in allowed:
        conditions = re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*$", text, re.M)
        assert not conditions, f"{short(path)}: {conditions[0]}"
    # A `_kernel.h` is the body of the files of one op, one per instruction set, and each includes it once.
    if path.suffix in (".h", ".cuh") and not path.name.endswith("_kernel.h"):
        assert text.startswith("#pragma once\n"), f"{short(path)} must start with #pragma once"
    assert not re.search(r"^using namespace (?!py::literals)", text, re.M), f"{short(path)}: using namespace"


def test_instruction_set_files_keep_their_code_to_themselves():
    # Inline functions of the standard library compiled for a newer processor may be the copy that the linker
    # keeps.
    allowed = {"cstdint", "cstddef", "immintrin.h"}
    for path in CPP:
        if INTRINSICS.search(path.name):
            system = {name for bracket, name in includes(path) if bracket == "<"}
            assert system <= allowed, f"{short(path)} includes {sorted(system - allowed)}"


# ---- CUDA and its emulator -----------------------------------------------------------------------

KERNELS = [path for path in CPP if path.relative_to(CSRC).parts[0] == "cuda"]


def code(path: Path) -> str:
    """The file without comments and texts."""
    return re.sub(r'//.*|"(?:[^"\\\n]|\\.)*"', "", path.read_text())


@pytest.mark.parametrize("path", KERNELS, ids=short)
def test_kernels_are_plain_cuda(path):
    """What a host compiler under the emulator can take as it is; see csrc/cuda/device/ptx.cuh."""
    text = code(path)
    assert "<<<" not in text, f"{short(path)}: launch kernels by cuda/launch.h"
    if short(path) in PTX:
        return
    for word, instead in {
        r"\basm\b": "inline PTX stands in device/ptx*.cuh",
        r"\b__shared__\b": "shared memory comes from shared_memory<SharedMemory>()",
        r"\b__ldg\b": "global memory is read by load_read_only",
        r"\bprintf\b": "kernels do not print",
    }.items():
        assert not re.search(word, text), f"{short(path)}: {instead}"


@pytest.mark.parametrize("path", CPP, ids=short)
def test_product_code_knows_no_emulator(path):
    if short(path) not in PTX:  # where every instruction stands beside its twin
        assert "simt::" not in code(path), f"{short(path)}: the emulator stays behind CUDA's headers"


@pytest.mark.parametrize("path", SIMT, ids=short)
def test_the_emulator_knows_no_op(path):
    folder = path.relative_to(ROOT / "tests/simt").parts[0]
    allowed = {
        "forward": ("simt/emulator.h", "simt/forward/", "eagle_cuda/", "common/"),
        "selftest": ("simt/", "cuda/device/", "cuda/launch.h", "common/"),
    }.get(folder, ("simt/",))
    for bracket, name in includes(path):
        if bracket == '"':
            assert name.startswith(allowed), f"{short(path)} includes {name}"


# ---- Python --------------------------------------------------------------------------------------


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names taken from it) of every import in the file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}: relative import"
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def top(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", files("eagle_cuda", ".py"), ids=short)
def test_eagle_cuda_knows_tensors_only(path):
    allowed = {"numpy", "torch", "eagle_cuda", *sys.stdlib_module_names}
    assert {top(module) for module, _ in imports(path)} <= allowed


@pytest.mark.parametrize("path", files("python/eagle_decode", ".py"), ids=short)
def test_eagle_decode_uses_public_ops(path):
    for module, names in imports(path):
        if top(module) == "eagle_cuda":
            private = [part for part in [*module.split("."), *names] if part.startswith("_")]
            assert not private, f"{short(path)}: {module} {names} is private to eagle_cuda"
        assert top(module) not in {"tests", "benchmarks", "reference"}, f"{short(path)} imports {module}"


@pytest.mark.parametrize("path", files("tests/reference", ".py"), ids=short)
def test_references_never_import_the_library(path):
    allowed = {"numpy", "torch", "reference", *sys.stdlib_module_names}
    assert {top(module) for module, _ in imports(path)} <= allowed


@pytest.mark.parametrize("path", files("eagle_cuda", ".py"), ids=short)
def test_public_functions_are_typed_and_documented(path):
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        assert ast.get_docstring(node), f"{short(path)}: {node.name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            untyped = [argument.arg for argument in arguments if argument.annotation is None]
            assert not untyped, f"{short(path)}: {node.name}: no type for {untyped}"
            assert node.returns is not None, f"{short(path)}: {node.name} has no return type"


# ---- all files -----------------------------------------------------------------------------------

OWN = [*CPP, *SIMT, *files("tests/cpp", ".cpp", ".h"), *PYTHON]


def test_modules_that_meet_in_one_path_have_names_of_their_own():
    """Tests import each other's helpers, and those of benchmarks, by bare names."""
    homes: dict[str, list[str]] = {}
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).glob("*.py")):
            homes.setdefault(path.stem, []).append(short(path))
    assert not [paths for paths in homes.values() if len(paths) > 1]


@pytest.mark.parametrize("path", OWN, ids=short)
def test_length(path):
    count = len(path.read_text().splitlines())
    limit = MAX_TEST_LINES if path.name.startswith("test_") else MAX_LINES
    assert count <= limit, f"{short(path)}: {count} lines; at most {limit}: split it by what it does"


# Put together from parts so that this file does not contain them.
FORBIDDEN = [
    "/" + "work/",
    "/" + "root/",
    "/" + "opt/",
    "py" + "pi.org",
    "pythonhos" + "ted",
    "download.py" + "torch",
]
TEXTS = [
    *OWN,
    *(path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".so" and path.name != "LICENSE"),
    *files("docs", ".md"),
    *files("tests/cpp", ".txt"),
    *files("tests/simt", ".txt"),
    *files("cmake", ".cmake"),
    *files("tools", ".sh"),
    *(ROOT / ".ci").glob("*"),
]


@pytest.mark.parametrize("path", TEXTS, ids=short)
def test_no_machine_paths_and_no_registry_hosts(path):
    text = path.read_text()
    for word in FORBIDDEN:
        assert word not in text, f"{short(path)} contains {word}"


# ---- the build description -----------------------------------------------------------------------


def test_cmake_lists_every_source_and_nothing_else():
    text = re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text())
    text = re.sub(r"set_source_files_properties\([^)]*\)", "", text)
    listed = re.findall(r"\bcsrc/[\w/]+\.(?:cpp|cu)\b", text)
    assert len(listed) == len(set(listed)), "CMakeLists.txt lists a source twice"
    on_disk = {short(path) for path in CPP if path.suffix in (".cpp", ".cu")}
    assert set(listed) == on_disk


def test_instruction_set_files_are_in_their_lists():
    text = (ROOT / "CMakeLists.txt").read_text()
    for suffix, name in (("avx2", "AVX2"), ("avx512", "AVX512"), ("avx512_bf16", "AVX512_BF16")):
        block = re.search(rf"set\(CPU_{name}_SOURCES(.*?)\)", text, re.S).group(1)
        listed = set(re.findall(r"csrc/\S+\.cpp", block))
        assert listed == {short(path) for path in CPP if path.name.endswith(f"_{suffix}.cpp")}


def cuda_functions(text: str, end: str) -> set[tuple[str, int]]:
    """(name, number of parameters) of the functions in the `cuda` namespace; `end` follows a signature."""
    found = set()
    for block in re.findall(
        r"^namespace (?:eagle::)?cuda \{(.*?)^\}  // namespace (?:eagle::)?cuda|"
        r"^namespace cuda \{\n(.*?)^\}$",
        text,
        re.M | re.S,
    ):
        for name, parameters in re.findall(rf"^[\w:]+ (\w+)\(([^()]*)\){end}", "".join(block), re.M):
            found.add((name, parameters.count(",") + 1))
    return found


def declared_entry_points() -> set[tuple[str, int]]:
    return set().union(*(cuda_functions(path.read_text(), ";") for path in files("csrc/include", ".h")))


def test_every_cuda_entry_point_throws_where_the_backend_is_off():
    declared = declared_entry_points()
    assert len(declared) >= 15
    assert cuda_functions((CSRC / "cuda/no_cuda.cpp").read_text(), r" \{ no_cuda\(\); \}") == declared


def test_every_kernel_file_is_one_op_and_is_emulated():
    """One .cu per op, named after it; tests/simt/forward names the same ops, so that their tests run it."""
    kernels = {path.stem: path for path in KERNELS if path.suffix == ".cu"}
    without_backend = cuda_functions((CSRC / "cuda/no_cuda.cpp").read_text(), r" \{ no_cuda\(\); \}")
    ops = {name for name, _ in without_backend if not name.endswith("_bytes")}
    assert ops == set(kernels)
    forward = {path.stem: path for path in files("tests/simt/forward", ".cpp")}
    assert set(forward) == set(kernels)
    for op, path in kernels.items():
        assert (op, 2) in cuda_functions(path.read_text(), r" \{"), f"{short(path)} defines no cuda::{op}"
        assert f"cuda::{op}(p, nullptr)" in forward[op].read_text(), (
            f"{short(forward[op])} calls no cuda::{op}"
        )
        ours = files(f"csrc/cpu/{path.parent.name}", ".cpp")
        assert any(re.search(rf"^void (cpu::)?{op}\(", cpu.read_text(), re.M) for cpu in ours), (
            f"{short(path)}: the CPU's is elsewhere"
        )


def test_every_kernel_has_tests_that_name_it():
    """`@pytest.mark.op(...)`: the tests that must launch it (tests/conftest.py)."""
    named = set()
    for path in files("tests", ".py"):
        for names in re.findall(r"mark\.op\(([^)]*)\)", path.read_text()):
            named |= set(re.findall(r'"(\w+)"', names))
    assert named == {path.stem for path in KERNELS if path.suffix == ".cu"}
