"""Builds eagle_cuda._C with CMake. What is packaged stands in pyproject.toml; no compiler flag lives here.

In the environment, EAGLE_CUDA=AUTO|ON|OFF chooses the CUDA backend and EAGLE_CUDA_ARCHITECTURES its GPUs: by
default those of a release for a wheel, and this machine's for a build in place. The rest is CMakeLists.txt.
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

    def run(self) -> None:
        self.for_this_machine = bool(self.inplace or self.editable_mode)  # `inplace` is off during the build
        super().run()

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": out,
            "Python_EXECUTABLE": sys.executable,
            "EAGLE_CUDA": os.environ.get("EAGLE_CUDA") or "AUTO",
            "EAGLE_CUDA_ARCHITECTURES": os.environ.get("EAGLE_CUDA_ARCHITECTURES")
            or ("" if self.for_this_machine else "release"),
        }
        configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "--log-level=NOTICE"]
        subprocess.check_call([*configure, *(f"-D{name}={value}" for name, value in settings.items())])
        subprocess.check_call(["cmake", "--build", build, "--target", "_C"])


setup(ext_modules=[Extension("eagle_cuda._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
