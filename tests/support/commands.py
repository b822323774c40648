"""Commands as tests run them: in processes of their own, and inside the test's, which saves the start of another."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from unittest import mock

import click
import pytest

from decodery.cli.main import cli, main

COMMAND = [sys.executable, "-m", "decodery"]

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""One thread each: the tests share the machine, and threads that wait for one another do not."""

PROMPT = "Name three colours of the rainbow."


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [*COMMAND, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


def inside(
    *arguments: str,
    text: str = "",
    terminal: bool = False,
    output: io.StringIO | None = None,
    group: click.Command = cli,
) -> tuple[int, str, str]:
    """Exit status, output and errors of a command run in this process. group: the command that takes the arguments."""
    output, errors = output or io.StringIO(), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(text.encode()))
    typed.isatty = lambda: terminal  # type: ignore[method-assign]
    with mock.patch.multiple(sys, stdin=typed, stdout=output, stderr=errors), pytest.raises(SystemExit) as left:
        main(arguments, group=group)
    assert isinstance(left.value.code, int)
    return left.value.code, output.getvalue(), errors.getvalue()
