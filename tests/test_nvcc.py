"""nvcc as a gate: every kernel compiles, keeps the register budget written beside it, spills nothing, has no
stack frame, and holds by itself the wide accesses we count on. One architecture in `make test`, with one
instantiation of what has many; every instantiation, and the oldest architecture, in `make test-full`; every
one of that too by `tools/ptxas_report.py sm_80`. Skipped where there is no nvcc."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import machine_code
from tools import ptxas_report
from tools.ptxas_report import ROOT, Compiled, CompileError, cuda_sources

CMAKE = ROOT / "cmake/cuda_architectures.cmake"
SOURCES = cuda_sources()
# Files with many instantiations, and the few that `make test` compiles: list of common/dispatch.h -> choice.
ONE_OF_MANY = {
    "attention/tree_attention.cu": {"HeadDims": "Values<128>", "FloatTypes": "Types<bf16_t>"},
    "draft/draft.cu": {"HeadDims": "Values<128>", "FloatTypes": "Types<bf16_t>"},
    "linear/linear.cu": {"FloatTypes": "Types<bf16_t>"},  # every format of weights
    "linear/lm_head_topk.cu": {"FloatTypes": "Types<bf16_t>"},
}
FEW = 15  # instantiations of a kernel
# Of processor time, for the files of a noun that have many: 184 at most on a slow machine under load.
NOUN_SECONDS = 300

needs_nvcc = pytest.mark.skipif(
    ptxas_report.nvcc() is None, reason="needs nvcc, which is not on this machine"
)
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def short(path: object) -> str:
    return path.stem if isinstance(path, Path) else str(path)


def one_instantiation(source: Path, folder: Path) -> Path:
    """A file that stands for `source`, with the lists that it dispatches over cut short."""
    lists = ONE_OF_MANY[str(source.relative_to(ROOT / "csrc/cuda"))]
    text = '#include "common/dispatch.h"\nnamespace eagle::one {\n'
    text += "".join(f"using {name} = {choice};\n" for name, choice in lists.items()) + "}\n"
    text += "".join(f"#define {name} one::{name}\n" for name in lists)
    path = folder / source.name
    path.write_text(f'{text}#include "{source.relative_to(ROOT / "csrc")}"\n')
    return path


MANY = [ROOT / "csrc/cuda" / name for name in ONE_OF_MANY]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(source, architecture, whole) -> Compiled; of the files of MANY one instantiation unless `whole`.
    Compiles all files at the first use."""

    @functools.cache
    def together(arch: str, whole: bool) -> dict[Path, Compiled | CompileError]:
        folder = tmp_path_factory.mktemp("nvcc")
        if whole:
            return ptxas_report.compile_all(MANY, arch, folder)
        files = {one_instantiation(path, folder) if path in MANY else path: path for path in SOURCES}
        results = ptxas_report.compile_all(list(files), arch, folder)
        return {files[path]: result for path, result in results.items()}

    def one(source: Path, arch: str, whole: bool = False) -> Compiled:
        result = together(arch, whole and source in MANY)[source]
        if isinstance(result, CompileError):
            pytest.fail(str(result), pytrace=False)
        return result

    return one


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=short)
def test_kernels_keep_their_budgets(compiled, source):
    assert ptxas_report.faults(compiled(source, "sm_90a")) == []


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("source", MANY, ids=short)
def test_every_instantiation_keeps_its_budget(compiled, source):
    assert ptxas_report.faults(compiled(source, "sm_90a", whole=True)) == []


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES, ids=short)
def test_kernels_keep_their_budgets_on_the_oldest(compiled, source):
    assert ptxas_report.faults(compiled(source, "sm_80")) == []


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("noun", sorted({source.parent.name for source in MANY}))
def test_a_noun_compiles_in_minutes(compiled, noun, capsys):
    files = [compiled(source, "sm_90a", whole=True) for source in MANY if source.parent.name == noun]
    seconds, kernels = sum(file.seconds for file in files), sum(len(file.kernels) for file in files)
    with capsys.disabled():
        print(f"\nnvcc, sm_90a, {noun}: {kernels} kernels in {seconds:.0f} s of processor time")
    assert seconds <= NOUN_SECONDS


@needs_nvcc
@pytest.mark.parametrize("source", MANY, ids=short)
def test_one_instantiation_stands_for_many(compiled, source):
    """Each kernel of the file once or, where something other than the lists chooses too, a few times."""
    names = [kernel.name.partition("<")[0] for kernel in compiled(source, "sm_90a").kernels]
    assert set(names) == set(ptxas_report.budgets(source))
    assert len(names) <= FEW * len(set(names))


# ---- wide accesses -------------------------------------------------------------------------------

# What every kernel of these files must do 16 bytes at a time, in bulk, or on tensor cores.
STREAM = ("copy", "bulk copy", "product")
WIDE = {
    "kv_cache/compact_kv.cu": {"compact_kv_kernel": ("load", "store")},
    "sampling/sample_tokens.cu": {"sample_tokens_kernel": ("load",)},
    "draft/draft.cu": {
        "persistent_draft_kernel": STREAM,
        "path_rows_kernel": ("load", "store"),
        "parent_rows_kernel": ("load", "store"),
    },
    "attention/tree_attention.cu": {"common_pass_kernel": ("copy", "product"), "finish_kernel": ("copy",)},
    "linear/linear.cu": {"linear_kernel": STREAM, "linear_many_kernel": STREAM},
    "linear/lm_head_topk.cu": {"lm_head_topk_kernel": STREAM, "lm_head_topk_many_kernel": STREAM},
}
# ptxas never splits these, so that the PTX is enough where there is no disassembler.
PTX = {
    "load": r"^\s*(?:@\S+\s+)?ld\.(?!shared|param|local)[\w.:]*\.(?:v4\.\w32|v2\.\w64)\s",
    "store": r"^\s*(?:@\S+\s+)?st\.(?!shared|param|local)[\w.:]*\.(?:v4\.\w32|v2\.\w64)\s",
    "copy": r"\bcp\.async\.cg\.shared\.global \S+, \S+, 16,",
    "bulk copy": r"\bcp\.async\.bulk\.shared::cluster\.global\b",
    "bf16 product": r"\bmma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32\b",
    "fp16 product": r"\bmma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32\b",
    "integer product": r"\bmma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32\b",
}
MACHINE_CODE = {"load": r"LDG?\.E\b.*\.128\b.*", "store": r"STG?\.E\b.*\.128\b.*"}


def wide_accesses(path: str, kernel: str) -> list[str]:
    """Of an instance of a kernel of WIDE."""
    product = {"FloatProducts": None, "IntegerProducts": "integer product", "half_t": "fp16 product"}
    found = next((product[part] for part in product if part in kernel), "bf16 product")
    accesses = WIDE[path][kernel.partition("<")[0]]
    return [name for name in (found if access == "product" else access for access in accesses) if name]


def ptx_of_kernels(text: str) -> dict[str, str]:
    parts = re.split(r"^(?:\.\w+ )*\.(?=(?:entry|func)\b)", text, flags=re.M)
    found = {match.group(1): part for part in parts if (match := re.match(r"entry (\w+)", part))}
    names = ptxas_report.demangle(list(found))
    return {ptxas_report.without_parameters(name): part for name, part in zip(names, found.values())}


def disassembler() -> str | None:
    """nvdisasm: on PATH, beside nvcc, or inside a package that carries one."""
    packages = Path(sysconfig.get_path("purelib"))
    folders = [packages / "triton/backends/nvidia/bin", packages / "nvidia/cu13/bin"]
    folders += [Path(home, "bin") for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if home]
    return shutil.which("nvdisasm", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


def listing(compiled: Compiled) -> str:
    tool = disassembler()
    if tool is None:
        pytest.skip("needs nvdisasm, which is not on this machine; the PTX was looked at")
    command = [tool, "-g", "-c", compiled.cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_nvcc
@pytest.mark.parametrize("path", WIDE)
def test_wide_accesses_in_the_ptx_of_every_kernel(compiled, path):
    result = compiled(ROOT / "csrc/cuda" / path, "sm_90a")
    kernels = ptx_of_kernels(result.ptx.read_text())
    assert set(kernels) == {kernel.name for kernel in result.kernels}
    for kernel, text in kernels.items():
        for access in wide_accesses(path, kernel):
            assert re.search(PTX[access], text, re.M), f"{path}, {kernel}: no 16-byte {access} in the PTX"


def check_machine_code(path: str, result: Compiled) -> None:
    kernels = machine_code.kernels(listing(result))
    assert set(kernels) == {kernel.name for kernel in result.kernels}
    assert {name.partition("<")[0] for name in kernels} == set(WIDE[path])
    for kernel, code in kernels.items():
        if kernel.partition("<")[0] in machine_code.STREAMING:
            assert machine_code.faults(kernel, code) == []
            continue
        for access in wide_accesses(path, kernel):
            assert machine_code.count(code, MACHINE_CODE[access]), f"{path}, {kernel}: no 16-byte {access}"


@needs_nvcc
@pytest.mark.parametrize("path", WIDE)
def test_wide_accesses_in_the_machine_code_of_every_kernel(compiled, path):
    check_machine_code(path, compiled(ROOT / "csrc/cuda" / path, "sm_90a"))


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("path", ONE_OF_MANY)
def test_wide_accesses_in_the_machine_code_of_every_instantiation(compiled, path):
    check_machine_code(path, compiled(ROOT / "csrc/cuda" / path, "sm_90a", whole=True))


# Kernels among those of linear.cu, an edit of their machine code, and what must be said of them alone.
DOCTORED = [
    (
        "linear_kernel<.*Int8Code.*",
        "LDS.128",
        "LDS.64",
        ["16 bytes of a step", "2 LDS.64, expected at most 0"],
    ),
    (
        "linear_kernel<.*Int4Codes.*",
        "LDS.128",
        "LDS.U8",
        ["1 bytes of a step", "1 LDS.U8, expected at most 0"],
    ),
    ("linear_many_kernel<.*Int4Codes.*", "LDS.U16", "LDS.U8", ["0 reads of scales", "4 LDS.U8, expected"]),
    (
        "linear_many_kernel<.*TensorProducts<eagle::bf16_t.*",
        "HMMA.16816.F32.BF16",
        "FFMA",
        ["0 matrix products"],
    ),
    ("linear_kernel<.*IntegerProducts.*", "IMMA.16832.S8.S8", "IDP.4A.S8.S8", ["0 matrix products"]),
    ("linear_many_kernel<.*Float8Code.*", "LDSM.16.M88.4", "LDS.128", ["0 ldmatrix, expected 16"]),
    ("linear_kernel<.*FloatProducts.*", "UBLKCP.S.G", "NOP", ["0 bulk copies"]),
    (
        "linear_kernel<.*half_t.*",
        "LDGSTS.E.BYPASS.128",
        "LDGSTS.E.64",
        ["0 copies of 16", "7 copies of less"],
    ),
]


@needs_nvcc
@pytest.mark.parametrize(("kernel", "old", "new", "reported"), DOCTORED)
def test_doctored_machine_code_is_reported(compiled, kernel, old, new, reported):
    text = listing(compiled(ROOT / "csrc/cuda/linear/linear.cu", "sm_90a"))
    parts = re.split(r"^(?=\s*\.section\s+\.text\.)", text, flags=re.M)
    names = ["", *machine_code.kernels(text)]  # in the listing's order; before the first section, none
    assert len(parts) == len(names)
    mine = [name for name in names if re.fullmatch(kernel, name)]
    assert len(mine) == 1
    edited = [
        part.replace(f" {old}", f" {new}") if name in mine else part for name, part in zip(names, parts)
    ]
    for name, code in machine_code.kernels("".join(edited)).items():
        found = machine_code.faults(name, code)
        assert len(found) == (len(reported) if name in mine else 0), found
        assert not found or all(any(text in fault for fault in found) for text in reported), found


# ---- the gate can fail ---------------------------------------------------------------------------

HEAD = "#include <cuda_runtime.h>\nnamespace eagle::cuda {\n"
SUM = "__global__ void {}(const float* in, float* out) {{ out[0] = in[0] + in[1]; }}\n"
LOCAL_ARRAY = """
  int x[40];
  for (int i = 0; i < 40; ++i) x[i] = in[i];
  for (int i = 0; i < 40; ++i) x[in[i]] += in[x[i]];
"""
# Kernels with something amiss among kernels without; each part stands by itself.
PLANTED = [
    """
// registers: <= 255
__global__ void __launch_bounds__(1024, 2) spilling_kernel(const float* in, float* out) {
  float x[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) x[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) out[i * 1024 + threadIdx.x] = x[i] * x[(i + 23) % 48];
}
""",
    "// registers: <= 255\n__global__ void local_array_kernel(const int* in, int* out) {"
    f"{LOCAL_ARRAY} out[0] = x[in[7]]; }}\n",
    f"__device__ __noinline__ int called(const int* in, int n) {{{LOCAL_ARRAY} return x[n]; }}\n"
    "// registers: <= 255\n"
    "__global__ void calling_kernel(const int* in, int* out) { out[0] = called(in, in[3]); }\n",
    "// registers: <= 3\n" + SUM.format("narrow_kernel"),
    SUM.format("unbudgeted_kernel"),
    "// registers: <= 99\nint other;\n" + SUM.format("neighbour_kernel"),
    SUM.format("early_kernel") + "// registers: <= 99\n",
    """
// registers: <= 2
template <class T, int kSize = (sizeof(T) > 4 ? 2 : 1)>
__global__ void __launch_bounds__(static_cast<int>(128 * (kSize + 1)))
    copy_kernel(const T* in, T* out) {
  out[threadIdx.x] = in[threadIdx.x];
}
template __global__ void copy_kernel<float>(const float*, float*);
template __global__ void copy_kernel<double>(const double*, double*);
""",
    "// Adds.\n// registers: <= 20\n// Twice.\n" + SUM.format("clean_kernel"),
    "// registers: <= 20\ntemplate <int kN>\n"
    "__global__ void __launch_bounds__(kN) sized_kernel(int* out) { out[threadIdx.x] = kN; }\n"
    "template __global__ void sized_kernel<32>(int*);\n",
]
REPORTED = [
    r"spilling_kernel: a stack frame of [1-9]\d* bytes, expected none",
    r"spilling_kernel: spills [1-9]\d* bytes and reloads [1-9]\d*, expected none",
    r"local_array_kernel: a stack frame of 160 bytes, expected none",
    r"(calling_kernel|called): a stack frame of 160 bytes, expected none",
    r"narrow_kernel: \d+ registers, budget 3",
    r"unbudgeted_kernel: (\d+) registers and no budget; write `// registers: <= \1` above it",
    r"neighbour_kernel: \d+ registers and no budget; write .*",
    r"early_kernel: \d+ registers and no budget; write .*",
    r"copy_kernel<float, 1>: \d+ registers, budget 2",
    r"copy_kernel<double, 2>: \d+ registers, budget 2",
]


@needs_nvcc
def test_the_gate_reports_what_is_amiss_and_nothing_else(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(HEAD + "\n".join(PLANTED) + "}\n")
    result = ptxas_report.compile_kernels(source, "sm_90a", tmp_path / "out")
    found = ptxas_report.faults(result)
    for pattern in REPORTED:
        assert sum(bool(re.fullmatch(pattern, fault)) for fault in found) == 1, f"{pattern}: {found}"
    assert len(found) == len(REPORTED), found
    assert {"clean_kernel", "sized_kernel<32>"} <= {kernel.name for kernel in result.kernels}
    assert not re.search(PTX["load"], result.ptx.read_text(), re.M)


@needs_nvcc
def test_a_file_without_a_kernel_is_amiss(tmp_path):
    source = tmp_path / "empty.cu"
    source.write_text(HEAD + "int nothing;\n}\n")
    result = ptxas_report.compile_kernels(source, "sm_90a", tmp_path / "out")
    assert ptxas_report.faults(result) == ["no kernel in this file"]


@needs_nvcc
@pytest.mark.parametrize("text", ["int f() { return undeclared; }", "static int never_used() { return 1; }"])
def test_errors_and_warnings_refuse_the_file(text, tmp_path):
    source = tmp_path / "bad.cu"
    source.write_text(text + "\n")
    with pytest.raises(CompileError, match=r"bad\.cu for sm_90a:[\s\S]*(undeclared|never_used)"):
        ptxas_report.compile_kernels(source, "sm_90a", tmp_path / "out")


def test_the_gate_compiles_as_the_build_does():
    folder = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    database = ROOT / "build" / folder / "compile_commands.json"
    commands = json.loads(database.read_text()) if database.is_file() else []
    commands = [entry for entry in commands if "/eagle_cuda.dir/" in entry["command"]]  # the emulator's not
    found = {entry["file"]: entry["command"] for entry in commands if entry["file"].endswith(".cu")}
    if not found:
        pytest.skip("needs a build with CUDA in build/")
    for source in SOURCES:
        assert str(source) in found
        missing = [flag for flag in ptxas_report.FLAGS if flag not in found[str(source)].split()]
        assert missing == [], f"{source.name}: the build compiles it without {missing}"


# ---- the architectures ---------------------------------------------------------------------------

ARCHITECTURE_LISTS = {
    "release": "80-real;86-real;89-real;90a-real;100a-real;120a-real;120-virtual",
    "80": "80",
    "80-real;90a-real;120-virtual": "80-real;90a-real;120-virtual",
}
BAD_LISTS = [
    "8.0",
    "8.9+PTX",
    "9.0a",
    "12.0",
    "80,86",
    "80 86",
    "sm_90",
    "all",
    "90b",
    "80-real;ninety",
    "-1",
]


def architectures(value: str, *, path: str | None = None, compiler: str | None = None) -> tuple[str, str]:
    """(CMAKE_CUDA_ARCHITECTURES, what was said) for EAGLE_CUDA_ARCHITECTURES=`value`; an empty list where it
    was refused."""
    options = [f"-DEAGLE_CUDA_ARCHITECTURES={value}"]
    if compiler:
        options.append(f"-DCMAKE_CUDA_COMPILER={compiler}")
    environment = {**os.environ, **({"PATH": path} if path else {})}
    cmake = shutil.which("cmake")
    done = subprocess.run([cmake, *options, "-P", CMAKE], capture_output=True, text=True, env=environment)
    said = " ".join((done.stdout + done.stderr).split())
    found = re.search(r"GPU architectures (\S+)", said)
    assert (done.returncode == 0) == (found is not None), said
    return found.group(1) if found else "", said


def program(folder: Path, name: str, output: str) -> Path:
    """A command that prints `output`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)
    return path


@needs_cmake
@pytest.mark.parametrize("value", ARCHITECTURE_LISTS)
def test_architecture_lists(value):
    assert architectures(value)[0] == ARCHITECTURE_LISTS[value]


@needs_cmake
@pytest.mark.parametrize("value", BAD_LISTS)
def test_misspelt_architectures_are_refused_before_anything_compiles(value):
    found, said = architectures(value)
    assert found == ""
    wrong = value.partition(";")[2] or value
    assert "EAGLE_CUDA_ARCHITECTURES: expected `release`, `native` or numbers" in said
    assert f"got `{wrong}`" in said


@needs_cmake
def test_old_architectures_are_refused():
    assert "expected 80 (Ampere) or newer, got `75`" in architectures("75")[1]


@needs_cmake
def test_architectures_of_this_machine(tmp_path):
    # A stand-in for nvidia-smi: two Hopper GPUs, an Ada one, a Blackwell one.
    program(tmp_path, "nvidia-smi", "9.0\n9.0\n8.9\n12.0")
    path = f"{tmp_path}:/usr/bin:/bin"
    assert architectures("", path=path)[0] == "90a-real;89-real;120a-real"
    assert architectures("native", path=path)[0] == "90a-real;89-real;120a-real"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'has failed because it could not talk'; exit 9\n")
    assert architectures("", path=path)[0] == "90a-real"
    assert "expected a GPU that nvidia-smi lists, found none" in architectures("native", path=path)[1]


@needs_cmake
def test_an_nvcc_older_than_the_architectures(tmp_path):
    old = program(tmp_path, "nvcc", "sm_80\nsm_86\nsm_89\nsm_90")
    found, said = architectures("release", compiler=str(old))
    assert found == "80-real;86-real;89-real;90a-real;90-virtual"
    assert "is too old for 100a-real;120a-real;120-virtual: left out, 90-virtual added" in said
    found, said = architectures("80;100a", compiler=str(old))
    assert found == ""
    assert "cannot compile for `100a`; it knows 80 86 89 90" in said


PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(release LANGUAGES CXX)
include(CheckLanguage)
check_language(CUDA)
include("{}")
enable_language(CUDA)
add_library(release STATIC sum.cu)
"""


@needs_nvcc
@needs_cmake
@pytest.mark.full
def test_this_nvcc_accepts_the_release_architectures(tmp_path):
    if architectures("release", compiler=ptxas_report.nvcc())[0] != ARCHITECTURE_LISTS["release"]:
        pytest.skip("this nvcc is older than the newest GPU of a release")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(CMAKE))
    (tmp_path / "sum.cu").write_text(HEAD + SUM.format("sum_kernel") + "}\n")
    configure = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja"]
    subprocess.run([*configure, "-DEAGLE_CUDA_ARCHITECTURES=release"], check=True, capture_output=True)
    built = subprocess.run(
        ["cmake", "--build", tmp_path / "build", "-v"], check=True, capture_output=True, text=True
    )
    for code in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_120"):
        assert f"code=[{code}]" in built.stdout, built.stdout


# ---- finding nvcc ------------------------------------------------------------------------------

FINDING = """
cmake_minimum_required(VERSION 3.24)
project(finding LANGUAGES NONE)
include("{}")
message(STATUS "with CUDA ${{EAGLE_WITH_CUDA}}; compiler ${{CMAKE_CUDA_COMPILER}}.")
"""


def find_nvcc(folder: Path, choice: str, **environment: str) -> tuple[int, str]:
    """(exit status, what was said) of cmake/find_nvcc.cmake for EAGLE_CUDA=`choice`."""
    (folder / "CMakeLists.txt").write_text(FINDING.format(ROOT / "cmake/find_nvcc.cmake"))
    command = ["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", f"-DEAGLE_CUDA={choice}"]
    clean = {key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_HOME")}
    done = subprocess.run(command, capture_output=True, text=True, env={**clean, **environment})
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@needs_cmake
def test_without_nvcc_the_build_is_for_the_cpu_unless_cuda_was_asked_for(tmp_path):
    nowhere = str(tmp_path / "nowhere/nvcc")
    status, said = find_nvcc(tmp_path, "AUTO", CUDACXX=nowhere)
    assert status == 0
    assert f"eagle_cuda: without the CUDA backend: nvcc was not found: CUDACXX is {nowhere}" in said
    assert "with CUDA OFF" in said
    status, said = find_nvcc(tmp_path, "ON", CUDACXX=nowhere)
    assert status != 0
    assert f"EAGLE_CUDA=ON: nvcc was not found: CUDACXX is {nowhere}; set CUDACXX" in said
    status, said = find_nvcc(tmp_path, "OFF", CUDACXX=nowhere)
    assert status == 0
    assert "with CUDA OFF" in said
    assert "without the CUDA backend" not in said


@needs_cmake
def test_misspelt_choice_is_refused(tmp_path):
    status, said = find_nvcc(tmp_path, "yes")
    assert status != 0
    assert "EAGLE_CUDA: expected AUTO, ON or OFF, got `yes`" in said


@needs_cmake
def test_an_nvcc_that_cannot_compile(tmp_path):
    broken = program(tmp_path, "nvcc", "nvcc: NVIDIA (R) Cuda compiler driver")
    status, said = find_nvcc(tmp_path, "AUTO", CUDACXX=str(broken))
    assert status == 0
    assert f"without the CUDA backend: {broken} cannot compile with the host compiler" in said
    status, said = find_nvcc(tmp_path, "ON", CUDACXX=str(broken))
    assert status != 0
    assert f"EAGLE_CUDA=ON: {broken} cannot compile" in said


@needs_nvcc
@needs_cmake
@pytest.mark.full
def test_cuda_home_with_odd_parts(tmp_path):
    (tmp_path / "home/bin").mkdir(parents=True)
    nvcc = tmp_path / "home/bin/nvcc"
    nvcc.write_text(f'#!/bin/sh\nexec {os.path.realpath(ptxas_report.nvcc())} "$@"\n')
    nvcc.chmod(0o755)
    status, said = find_nvcc(tmp_path, "ON", CUDA_HOME=f":{tmp_path / 'nothing'}:{tmp_path / 'home'}")
    assert status == 0, said
    assert f"with CUDA ON; compiler {nvcc}." in said
    # A version for which C++20 is too new is found out by its own words.
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    status, said = find_nvcc(tmp_path, "AUTO")
    assert status == 0
    assert f"without the CUDA backend: {nvcc} is version 11.8, and C++20 needs 12.0" in said


# ---- what setup.py asks for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        (["build_ext", "--inplace"], {}, ""),
        (["build_ext"], {}, "release"),
        (["bdist_wheel"], {}, "release"),
        (["build_ext"], {"EAGLE_CUDA_ARCHITECTURES": "90a-real"}, "90a-real"),
        (["build_ext", "--inplace"], {"EAGLE_CUDA_ARCHITECTURES": "80;86"}, "80;86"),
    ],
    ids=["in place", "installed", "wheel", "installed, named", "in place, named"],
)
def test_architectures_that_setup_asks_for(command, environment, expected, tmp_path):
    # A cmake that notes its arguments and fails, so that nothing is built.
    cmake = tmp_path / "cmake"
    cmake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/arguments"\nexit 7\n')
    cmake.chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("EAGLE_")}
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *command],
        cwd=ROOT,
        env={**clean, **paths, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert f"-DEAGLE_CUDA_ARCHITECTURES={expected}" in arguments
    assert "-DEAGLE_CUDA=AUTO" in arguments
