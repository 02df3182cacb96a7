"""What comes out of the build: an extension that needs neither torch nor CUDA, instruction sets that stay
apart, an installable C++ library, a wheel with everything in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from eagle_cuda._extension import _C

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = Path(_C.__file__)


def build_folder() -> Path:
    """Where CMake built the extension under test."""
    if os.environ.get("EAGLE_CUDA_EXTENSION"):
        return EXTENSION.parent
    return ROOT / "build" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def run(*command: object, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_extension_links_neither_torch_nor_cuda():
    needed = run("ldd", EXTENSION).lower()
    assert "libc.so" in needed
    for name in ("torch", "c10", "cuda", "cudart", "gomp", "libpython"):
        assert name not in needed, f"{EXTENSION.name} links {name}"


def test_the_extension_exports_its_entry_only():
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", EXTENSION).splitlines()]
    ours = [name for name in symbols if "eagle" in name]
    assert "PyInit__C" in symbols
    assert ours == []


def objects(suffix: str) -> list[Path]:
    return sorted((build_folder() / "CMakeFiles/eagle_host.dir/csrc/cpu").rglob(f"*{suffix}.cpp.o"))


@pytest.mark.parametrize("suffix", ["_avx2", "_avx512", "_avx512_bf16"])
def test_instruction_set_files_share_no_code(suffix):
    # A weak symbol is a function that the linker may take from this file for callers on any processor.
    found = objects(suffix)
    if not found:
        pytest.skip("the objects of this build are not on this machine")
    for path in found:
        lines = run("nm", "--defined-only", path).splitlines()
        weak = [line.split()[-1] for line in lines if line.split()[-2] in "WVuwv"]
        assert weak == [], f"{path.name} offers {weak[:3]} to every processor"


@pytest.mark.full
def test_embedder_builds_against_the_installed_library(tmp_path):
    # What a framework vendor does: install, find_package, link, run; and every public header compiles alone.
    run("cmake", "--install", build_folder(), "--component", "cpp", "--prefix", tmp_path / "installed")
    build = tmp_path / "build"
    run(
        "cmake",
        "-S",
        ROOT / "tests/cpp",
        "-B",
        build,
        f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}",
        "-G",
        "Ninja",
    )
    run("cmake", "--build", build)
    assert run(build / "vendor", timeout=60) == "vendor: ok\n"
    assert run(build / "thread_stress", timeout=120) == "thread_stress: ok\n"


@pytest.mark.full
def test_thread_pool_under_thread_sanitizer(tmp_path):
    compiler = os.environ.get("CXX", "c++")
    program = tmp_path / "thread_stress"
    sources = [ROOT / "csrc/cpu/parallel.cpp", ROOT / "tests/cpp/thread_stress.cpp"]
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-pthread",
        f"-I{ROOT}/csrc",
        f"-I{ROOT}/csrc/include",
    ]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    if subprocess.run(
        [compiler, "-fsanitize=thread", probe, "-o", tmp_path / "probe"], capture_output=True
    ).returncode:
        pytest.skip("this compiler has no ThreadSanitizer runtime")
    run(compiler, *flags, *sources, "-o", program)
    # Address randomisation wider than the sanitizer expects makes it refuse to start on some kernels.
    launcher = ["setarch", "-R"] if shutil.which("setarch") else []
    assert run(*launcher, program, "nofork", timeout=200) == "thread_stress: ok\n"


@pytest.mark.full
def test_wheel_holds_everything(tmp_path):
    # In the checkout, where the objects are built already, for the GPU of a build in place on a machine that
    # has none; without what an earlier wheel may have left.
    for stale in (ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        ".",
        cwd=ROOT,
        env={**os.environ, "EAGLE_CUDA_ARCHITECTURES": "90a-real"},
    )
    wheel = next(tmp_path.glob("eagle_cuda-*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    python = {
        str(path.relative_to(base))
        for base in (ROOT, ROOT / "python")
        for path in base.glob("eagle_*/**/*.py")
        if "__pycache__" not in path.parts
    }
    head = {
        f"eagle_decode/demo_head/{path.name}" for path in (ROOT / "python/eagle_decode/demo_head").glob("*.*")
    }
    assert python | head <= names
    assert any(name.startswith("eagle_cuda/_C.") and name.endswith(".so") for name in names)
    assert not any(name.startswith(("tests", "benchmarks", "csrc")) for name in names)
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = (
        "import eagle_cuda as e, eagle_decode; i = e.build_info();"
        "print(e.__file__, i['version'], i['cuda_architectures'] == ('90a-real' if i['cuda'] else ''))"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "EAGLE_CUDA_EXTENSION": ""}
    where, version, architectures = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).split()
    assert where.startswith(str(unpacked))
    assert (version, architectures) == ("0.1.0", "True")
