"""`make gpu-check`: state of the CUDA backend. There are no CUDA kernels yet, so nothing is run."""

from __future__ import annotations

import shutil

import torch

import eagle_cuda

info = eagle_cuda.build_info()
print("CUDA backend in this build:", "yes" if info["cuda"] else "no")
print("nvcc on this machine:      ", shutil.which("nvcc") or "not found")
print("GPU seen by torch:         ", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
if not info["cuda"]:
    print("This version has no CUDA kernels: ops on CUDA tensors raise RuntimeError. Nothing was checked.")
