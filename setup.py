"""Builds eagle_cuda._C with CMake and packages eagle_cuda and eagle_decode. No compiler flag lives here.

EAGLE_CUDA=AUTO|ON|OFF in the environment chooses the CUDA backend; the rest is CMakeLists.txt.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeBuild(build_ext):
    def build_extension(self, ext):
        out = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        subprocess.check_call(
            ["cmake", "-S", str(Path(__file__).parent), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
            + [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}", f"-DPython_EXECUTABLE={sys.executable}"]
            + [f"-DEAGLE_CUDA={os.environ.get('EAGLE_CUDA', 'AUTO')}"]
        )
        subprocess.check_call(["cmake", "--build", str(build), "--target", "_C", "--parallel", str(os.cpu_count() or 2)])


setup(ext_modules=[Extension("eagle_cuda._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
