"""The ops on a GPU, for tests that know CPU tensors only.

`install` wraps the native functions that have CUDA kernels. A wrapped call copies the memory behind its CPU
tensors to the device, whole, so that strides, offsets, aliases and the sentinel words around an output stay
what they are; calls the op on views of the copies; and copies all of it back, so that a write outside an
output is seen where the tests look for it. A call without CPU tensors goes straight through.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from tools.ptxas_report import cuda_sources

calls: Counter[str] = Counter()  # by op: calls that ran on copies, or on tensors of the device itself
_on_cpu: list[bool] = []


def ops_with_kernels() -> list[str]:
    """Every op with a CUDA kernel, by the name of its file."""
    return [path.stem for path in cuda_sources()]


def op_of(case: str) -> str:
    """The op of a case that is called like it, or further: "draft, static tree"."""
    return case.partition(",")[0]


def copyable(value: Any) -> torch.Tensor | None:
    """`value` as a CPU tensor over its own memory; None where it is not one, or one that every op refuses."""
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or min(value.strides, default=0) < 0:
            return None
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError):  # dtypes and byte orders that torch does not have
            return None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    return None if value.is_neg() or value.is_conj() else value


class Copies:
    """The memory behind CPU tensors, copied to a device once however many tensors share it."""

    def __init__(self, device: str):
        self.device = device
        self._storages: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def to_device(self, value: Any) -> Any:
        """`value`, its CPU tensors replaced by views of the copies."""
        if isinstance(value, (list, tuple)):
            return [self.to_device(item) for item in value]
        if isinstance(value, dict):
            return {key: self.to_device(item) for key, item in value.items()}
        if type(value).__name__ == "DraftHead":
            return sys.modules["eagle_cuda._C"].DraftHead(*map(self.to_device, value._arguments))
        if type(value).__name__ == "PackedWeight" and value.backend == "cpu":
            shape = (value.n, value.k, value.format, value.paired)
            return sys.modules["eagle_cuda._C"].own_weight(*shape, self.to_device(value.data))
        tensor = copyable(value)
        return value if tensor is None else self._view(tensor)

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[key] = host, torch.empty_like(host, device=self.device).copy_(host)
        copy = self._storages[key][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        view.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        return view if type(tensor) in (torch.Tensor, torch.nn.Parameter) else view.as_subclass(type(tensor))

    def __len__(self) -> int:
        return len(self._storages)

    def to_host(self) -> None:
        """Copies everything back; waits for the device and raises what went wrong on it."""
        for host, copy in self._storages.values():
            host.copy_(copy)


# Bytes of the workspace, by an op's arguments.
WORKSPACES: dict[str, Callable[[Any, list[Any]], int]] = {
    "tree_attention": lambda native, args: native.tree_attention_workspace_bytes(*args[:4]),
    "linear": lambda native, args: native.linear_workspace_bytes(args[1], args[0].shape[0]),
    "lm_head_topk": lambda native, args: native.lm_head_topk_workspace_bytes(
        args[1], args[0].shape[0], args[9].shape[1]
    ),
    "extend_draft": lambda native, args: native.extend_draft_workspace_bytes(args[0], args[3], *args[5:8]),
    "draft": lambda native, args: native.draft_workspace_bytes(
        args[0], *args[3].shape, args[10], args[11], *args[13:16]
    ),
}


def stands_on(device: str, values: Iterable[Any]) -> bool:
    """Whether there is a tensor of the device among the arguments; the CPU's say nothing."""
    return device != "cpu" and any(
        stands_on(device, value) if isinstance(value, (list, tuple)) else value.device.type == device
        for value in values
        if isinstance(value, (list, tuple, torch.Tensor))
    )


def on(device: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on copies on `device`."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        there = stands_on(device, (*args, *options.values()))
        if _on_cpu:
            result = function(*args, **options)
            calls[name] += there
            return result
        copies = Copies(device)
        args = [copies.to_device(value) for value in args]
        options = {key: copies.to_device(value) for key, value in options.items()}
        if name in WORKSPACES and args[-1] is None:  # kept by eagle_cuda for CUDA tensors only
            size = WORKSPACES[name](sys.modules["eagle_cuda._C"], args)
            args[-1] = torch.empty(size, dtype=torch.uint8, device=device)
        result = function(*args, **options)
        calls[name] += there or len(copies) > 0
        copies.to_host()
        return result

    return run


def wrapped(native: Any, device: str) -> list[tuple[Any, str, Any]]:
    """(module, attribute, replacement) of every place where eagle_cuda keeps a function that has a kernel."""
    modules = [module for name, module in list(sys.modules.items()) if top(name) == "eagle_cuda"]
    places = {id(module): module for module in [native, *modules]}.values()
    found = []
    for op in ops_with_kernels():
        original = getattr(native, op)
        replacement = on(device, op, original)
        for module in places:
            names = [name for name, value in vars(module).items() if value is original]
            found += [(module, name, replacement) for name in names]
    return found


def top(module: str) -> str:
    return module.partition(".")[0]


def install(native: Any, device: str = "cuda") -> None:
    """From here on the ops of the native module that have CUDA kernels run on `device`."""
    for module, name, replacement in wrapped(native, device):
        setattr(module, name, replacement)
    # Packed on the device, kept on the CPU: room for either layout.
    size = native.packed_weight_bytes

    def either(n: int, k: int, format: str, cuda: bool) -> int:
        return max(size(n, k, format, False), size(n, k, format, True))

    native.packed_weight_bytes = either
    # What neither layout fills is the same for equal weights.
    pages = sys.modules["eagle_cuda._huge_pages"]
    empty = pages.empty
    pages.empty = lambda size: empty(size).zero_()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, the ops take CPU tensors as they are: for a second opinion."""
    _on_cpu.append(True)
    try:
        yield
    finally:
        _on_cpu.pop()
