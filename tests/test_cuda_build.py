"""The CUDA backend on a machine without a driver: it imports, runs the CPU backend and says why a CUDA op
cannot run. And what is promised of devices: one for all tensors, current for the call, restored behind it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_cuda
import on_device
from eagle_cuda._extension import _C
from gpu.op_cases import CASES
from test_bindings import DELETER, DataType, Device, ManagedVersioned, Tensor, new_capsule
from tools import ptxas_report

ROOT = Path(__file__).resolve().parent.parent
INFO = eagle_cuda.build_info()
DTYPES = {
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}


class Fake:
    """An exporter that calls a CPU tensor's memory that of another device: never to be launched on."""

    def __init__(self, like: torch.Tensor, device: tuple[int, int]):
        self.like = like  # owns the memory
        self.shape = (ctypes.c_int64 * max(like.dim(), 1))(*like.shape)
        self.strides = (ctypes.c_int64 * max(like.dim(), 1))(*like.stride())
        self.managed = ManagedVersioned()
        self.managed.major, self.managed.deleter = 1, DELETER()
        dtype = DataType(*DTYPES[like.dtype], 1)
        self.managed.tensor = Tensor(
            like.data_ptr(), Device(*device), like.dim(), dtype, self.shape, self.strides, 0
        )

    def __dlpack__(self, **options: Any) -> Any:
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)


CPU, CUDA_0, CUDA_1 = (1, 0), (2, 0), (2, 1)


def native_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Any]]:
    """What the Python function of an op hands to the native one, by place and by name."""
    seen: list[Any] = []
    named: dict[str, Any] = {}

    def note(*args: Any, **options: Any) -> None:
        seen.extend(args)
        named.update(options)

    arrays, call = CASES[name]
    original = getattr(_C, on_device.op_of(name))
    with monkeypatch.context() as patch:
        for module, attribute, replacement in on_device.wrapped(_C, "cpu"):
            if replacement.__wrapped__ is original:
                patch.setattr(module, attribute, note)
        call(arrays(1))
    return seen, named


def tensors_in(value: Any) -> int:
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensors_in, value))
    if isinstance(value, _C.DraftHead):
        return tensors_in(value._arguments)
    return int(isinstance(value, (torch.Tensor, _C.PackedWeight)))


def faked(value: Any, devices: list[tuple[int, int]]) -> Any:
    """`value`, its tensors in order on the devices of the list, which it empties."""
    if isinstance(value, dict):
        return {name: faked(item, devices) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [faked(item, devices) for item in value]
    if isinstance(value, _C.DraftHead):  # which refuses what is not on its device
        return _C.DraftHead(*faked(value._arguments, devices))
    if isinstance(value, _C.PackedWeight):
        room = torch.empty(1 << 20, dtype=torch.uint8)
        return _C.own_weight(value.n, value.k, value.format, value.paired, Fake(room, devices.pop(0)))
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:  # of another size in another layout
        value = torch.empty(1 << 20, dtype=torch.uint8)
    return Fake(value, devices.pop(0)) if isinstance(value, torch.Tensor) else value


def call_on(devices: list[tuple[int, int]], name: str, arguments: Any) -> None:
    args, options = faked(arguments, devices)
    getattr(_C, on_device.op_of(name))(*args, **options)


@pytest.fixture
def no_gpu() -> None:
    if torch.cuda.is_available() or (INFO["cuda"] and eagle_cuda.cuda_available()):
        pytest.skip("would run on the GPU of this machine")


@pytest.mark.parametrize("name", CASES)
def test_an_op_says_that_there_is_no_device(name, no_gpu, monkeypatch):
    arguments = native_arguments(name, monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        call_on([CUDA_0] * tensors_in(arguments), name, arguments)
    words = str(caught.value)
    if INFO["cuda"]:
        device = r"no usable CUDA device: .*CUDA.* \(this build: CUDA \d+\.\d.*\)"
        assert re.fullmatch(rf"eagle_cuda: {device}; pass CPU tensors", words)
    else:
        assert re.match(r"eagle_cuda was built without the CUDA backend; pass CPU tensors", words)
    assert "\n" not in words


@pytest.mark.parametrize("other", [CUDA_1, CPU], ids=["second GPU", "CPU"])
@pytest.mark.parametrize("name", CASES)
def test_mixed_devices_are_refused(name, other, monkeypatch):
    arguments = native_arguments(name, monkeypatch)
    number = tensors_in(arguments)
    for i in range(number):
        devices = [CUDA_0] * number
        devices[i] = other
        with pytest.raises(
            ValueError,
            match=r"^[\w.\[\]]+: expected (device|a weight packed for|a tensor on) (cpu|cuda:\d), "
            r"got (one (packed )?for )?(cpu|cuda:\d)$",
        ):
            call_on(devices, name, arguments)


@pytest.mark.parametrize("name", on_device.ops_with_kernels())
def test_an_op_makes_its_device_current(name):
    # What a call on another GPU shows, which no test here can do.
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc/ops").glob("*.cpp")))
    guarded = rf"const DeviceGuard guard\((\w+)\);\n  \1\.device == DeviceType::kCPU \? cpu::{name}\(p\)"
    assert re.search(guarded, text)


def test_the_build_says_what_is_in_it():
    assert bool(INFO["cuda_toolkit"]) == bool(INFO["cuda_architectures"]) == INFO["cuda"]
    if INFO["cuda"]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", INFO["cuda_toolkit"])
        for architecture in INFO["cuda_architectures"].split(","):
            assert re.fullmatch(r"\d+[af]?(-real|-virtual)?", architecture)
    assert eagle_cuda.cuda_available() == (eagle_cuda.cuda_error() == "")


def test_the_reason_is_one_line(no_gpu):
    assert not eagle_cuda.cuda_available()
    expected = r"no usable CUDA device: .*(no driver: |is without the CUDA backend|\(this build: CUDA)"
    assert re.match(expected, eagle_cuda.cuda_error())
    assert "\n" not in eagle_cuda.cuda_error()


PROGRAM = """
import sys
import torch
import eagle_cuda
eagle_cuda.build_info()
eagle_cuda.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
print("asking", file=sys.stderr, flush=True)
eagle_cuda.cuda_available()
"""


@pytest.mark.skipif(not INFO["cuda"], reason="this build is without the CUDA backend")
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch itself loads the driver")
def test_importing_and_the_cpu_backend_touch_no_driver():
    # The loader tells which libraries are looked for.
    environment = {**os.environ, "LD_DEBUG": "libs", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    before, _, after = done.stderr.partition("asking\n")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "libcuda" not in before
    assert "find library=libcuda.so" in after


@pytest.mark.skipif(ptxas_report.nvcc() is None, reason="needs the headers of a CUDA toolkit")
def test_devices_and_errors_against_a_scripted_runtime(tmp_path):
    """csrc/cuda/driver.cpp and launch.h over a CUDA runtime that the test writes itself."""
    (tmp_path / "empty.cu").touch()
    dry = [ptxas_report.nvcc(), "--dryrun", "-c", str(tmp_path / "empty.cu")]
    said = subprocess.run(dry, capture_output=True, text=True).stderr
    includes = re.findall(r'"-I([^"]*)"', next(line for line in said.splitlines() if " INCLUDES=" in line))
    sources = [ROOT / "csrc/cuda" / name for name in ("driver.cpp", "launch.cpp")]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    command += ['-DEAGLE_CUDA_ARCHITECTURES="80-real,90a-real"', '-DEAGLE_CUDA_TOOLKIT="13.0.88"']
    command += [f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include", *(f"-isystem{path}" for path in includes)]
    command += [*map(str, sources), str(ROOT / "tests/cpp/driver_check.cpp"), "-o", str(tmp_path / "check")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "driver_check: ok\n"), done.stdout + done.stderr
