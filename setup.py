"""Builds the native kernels; everything else about the package stands in pyproject.toml.

The extension is optional: where there is no compiler the package installs without it and runs on PyTorch alone.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/decodery/model/csrc")

setup(
    ext_modules=[
        Extension(
            "decodery.model._native",
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
    ]
)
