"""Kernels compiled for NVIDIA cards, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys


def machine_code(program: str) -> list[int]:
    """The sizes that a program prints which compiles kernels: a process of its own, where nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]
