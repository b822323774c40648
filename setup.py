"""Builds the native kernels; everything else about the package stands in pyproject.toml.

They are a library of their own, which Python opens and which knows nothing of Python: a wheel serves every version of
it. The library is optional: where there is no compiler, or one that lacks what the kernels are written in, as on
Windows, the package installs without it and runs on PyTorch alone.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/decodery/core/native/csrc")


class BuildLibrary(build_ext):
    """Compiles sources side by side, and gives the library a name without a version of Python."""

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: object) -> list[str]:
            # Every one runs a compiler of its own, and they take much the same time.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(chain(*pool.map(partial(compile_in_turn, **options), ([each] for each in sources))))

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class Wheel(bdist_wheel):
    """A wheel for every Python of one kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    ext_modules=[]
    if sys.platform == "win32"
    else [
        Extension(
            "decodery.core.native._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            # Fusing a multiplication with an addition would make results differ between instruction sets.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-pthread",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
)
