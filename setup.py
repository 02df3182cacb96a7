"""Builds eagle_cuda._C with CMake. What is packaged stands in pyproject.toml; no compiler flag lives here.

EAGLE_CUDA=AUTO|ON|OFF in the environment chooses the CUDA backend; the rest is CMakeLists.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One CMake build, kept between calls in build/<python and platform>."""

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        quiet = ["--log-level=WARNING"] if self.distribution.verbose < 1 else []
        subprocess.check_call(
            ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *quiet]
            + [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}", f"-DPython_EXECUTABLE={sys.executable}"]
            + [f"-DEAGLE_CUDA={os.environ.get('EAGLE_CUDA', 'AUTO')}"]
        )
        subprocess.check_call(["cmake", "--build", str(build), "--target", "_C"])


setup(ext_modules=[Extension("eagle_cuda._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
