"""Finds the native module: `eagle_cuda._C`, or the file named by EAGLE_CUDA_EXTENSION (a build folder's)."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType


def load() -> ModuleType:
    """The native module, loaded once under the name `eagle_cuda._C`."""
    path = os.environ.get("EAGLE_CUDA_EXTENSION")
    if path:
        spec = importlib.util.spec_from_file_location("eagle_cuda._C", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"EAGLE_CUDA_EXTENSION: expected the path of a compiled module, got {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["eagle_cuda._C"] = module
        return module
    try:
        from eagle_cuda import _C
    except ImportError as error:
        raise ImportError(
            f"eagle_cuda: the native module is missing ({error}); run `pip install .` or `make build`"
        ) from error
    return _C


_C = load()
