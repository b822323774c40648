"""The documentation is true: what it shows runs, what is generated is up to date, what it links to exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import pytest

from decodery.cli.main import cli
from decodery.model.embedded import pull

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
BLOCKS = [
    pytest.param(language, code, id=f"{page.stem}-{number}-{language}")
    for page in PAGES
    for number, (language, code) in enumerate(
        re.findall(r"<!-- run -->\n```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which the model is there and `decodery` is this tree's command."""
    pull("smollm2")
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "decodery"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m decodery "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_shown_code_runs(language: str, code: str, environment: dict[str, str], tmp_path: Path) -> None:
    command = {"python": [sys.executable, "-c", code], "sh": ["bash", "-euo", "pipefail", "-c", code]}[language]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


def test_the_front_page_shows_code_that_runs() -> None:
    assert {block.id for block in BLOCKS} >= {"README-0-python", "README-1-sh"}


SHOWN = [
    pytest.param(shlex.split(command.replace("\\\n", " "), comments=True), id=f"{page.stem}-{number}")
    for page in PAGES
    for number, command in enumerate(
        found[1]
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for found in re.finditer(r"(?m)^(?:[^#\n]*\| *)?decodery ((?:[^\\\n|>]|\\\n)*)", block)
    )
]
"""The arguments of every command the pages show."""


@pytest.mark.parametrize("arguments", SHOWN)
def test_shown_commands_are_usage(arguments: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command, context = found, click.Context(found, parent=context)
    try:
        command.make_context(command.name, arguments, parent=context.parent)
    except click.exceptions.Exit:
        pass  # --help
    except click.BadParameter as error:
        # The files it names are the reader's.
        assert "does not exist" in str(error), error


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "tokens per pass" in done.stdout


def _generator() -> ModuleType:
    spec = spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    # In a process of its own: other tests make methods of theirs known in this one.
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_stale_pages_are_noticed() -> None:
    page = "before\n<!-- begin successor -->\nold\n<!-- end successor -->\nafter\n"
    filled = _generator().fill(page)
    assert filled.startswith("before\n<!-- begin successor -->\n\n```python\n") and filled.endswith("\nafter\n")
    assert _generator().fill(filled) == filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], target
