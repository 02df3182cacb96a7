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
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": out,
            "Python_EXECUTABLE": sys.executable,
            "EAGLE_CUDA": os.environ.get("EAGLE_CUDA", "AUTO"),
        }
        configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "--log-level=NOTICE"]
        subprocess.check_call([*configure, *(f"-D{name}={value}" for name, value in settings.items())])
        subprocess.check_call(["cmake", "--build", build, "--target", "_C"])


setup(ext_modules=[Extension("eagle_cuda._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
