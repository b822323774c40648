"""The documentation is true: what it shows runs, what is generated is up to date, what it links to exists."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import click
import pytest

import decodery
from bench import bench
from decodery.llm.tree_picture import Picture
from decodery.models.loaders.package_index import pull
from train import train

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def named(page: Path) -> str:
    """A page in the name of a test."""
    return "-".join(page.relative_to(ROOT).with_suffix("").parts)


def smaller(code: str, marked: str) -> str:
    """A block as it is run: where its mark says `with "100" as "2" and ...`, with these sizes in place of its own."""
    for shown, run in re.findall(r'"([^"]*)" as "([^"]*)"', marked):
        assert shown in code, f"the block does not show {shown!r}"
        code = code.replace(shown, run, 1)
    return code


BLOCKS = [
    pytest.param(language, smaller(code, marked), id=f"{named(page)}-{number}-{language}")
    for page in PAGES
    for number, (marked, language, code) in enumerate(
        re.findall(r"<!-- run( with .*?)? -->\n```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
]

# Pages that are read from top to bottom: each example goes on from those above it.
BLOCKS += [
    pytest.param(
        "python",
        "".join(re.findall(r"(?<!not run: it needs a server -->\n)```python\n(.*?)```", text, re.DOTALL)),
        id=f"{page.stem}-together",
    )
    for page in PAGES
    if "<!-- run together -->" in (text := page.read_text(encoding="utf-8"))
]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which the model is there and `decodery` is this tree's command."""
    pull("smollm2")
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "decodery"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m decodery "$@"\n')
    command.chmod(0o755)
    # A link would not be the environment's Python any more.
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_shown_code_runs(
    language: str,
    code: str,
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    if language == "python" and request.node.callspec.id != "README-0-python":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "shown.py").write_text(code, encoding="utf-8")
        runpy.run_path("shown.py", run_name="__main__")
        output, errors = capfd.readouterr()
    else:
        # What a reader tries first is tried in a process of its own, which has imported nothing else.
        command = {"python": [sys.executable, "-c", code], "sh": ["bash", "-euo", "pipefail", "-c", code]}[language]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        output, errors = done.stdout, done.stderr
        assert done.returncode == 0, errors
    assert output and not [line for line in errors.splitlines() if not line.startswith("wrote ")]


def test_the_front_page_shows_code_that_runs() -> None:
    assert {block.id for block in BLOCKS} >= {"README-0-python", "README-1-python", "README-2-sh"}


PROGRAMS = {"python benchmarks/bench.py": bench, "python benchmarks/train.py": train}
SHOWN = [
    pytest.param(program, shlex.split(rest.replace("\\\n", " "), comments=True), id=f"{named(page)}-{number}")
    for page in PAGES
    for number, (program, rest) in enumerate(
        found.groups()
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for found in re.finditer(
            rf"(?m)^(?:[^#\n]*\| *)?({'|'.join(PROGRAMS)}) ((?:'[^'\n]*'|\"[^\"\n]*\"|[^\\\n|>]|\\\n)*)", block
        )
    )
]
"""Every command of the benchmarks that the pages show: its program and its arguments."""


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(("program", "arguments"), SHOWN)
def test_shown_commands_of_benchmarks_are_usage(program: str, arguments: list[str]) -> None:
    command: click.Command = PROGRAMS[program]
    context = click.Context(command)
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


@pytest.mark.usefixtures("own_methods", "environment")
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert "tokens per pass" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_were_stored_as_they_ran(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells:
        *before, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(before, []), notebook.name, "exec"), names)
        shown = None
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), notebook.name, "eval"), names)
        else:
            exec(compile(ast.Module([last], []), notebook.name, "exec"), names)
        stored = "".join("".join(each.get("text", "")) for each in cell["outputs"])
        assert capsys.readouterr().out == stored
        assert [list(each["data"]) for each in cell["outputs"] if "data" in each] == (
            [["image/svg+xml", "text/plain"]] if isinstance(shown, Picture) else []
        )


OWN = {name: ast.parse((ROOT / "examples" / f"{name}.py").read_text("utf-8")) for name in ("own_methods", "successor")}


@pytest.mark.parametrize("example", OWN)
def test_methods_of_authors_need_one_import(example: str) -> None:
    imported = {node.module for node in ast.walk(OWN[example]) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name for name in imported if name.startswith("decodery")} == {"decodery.extend"}


def test_every_kind_of_method_is_shown_in_few_lines() -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    classes = {node.name: node for tree in OWN.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        assert f"class {name}(" in page
        assert node.end_lineno is not None and node.end_lineno - node.lineno < 40, name


def _generator() -> ModuleType:
    spec = spec_from_file_location("generate", ROOT / "tools" / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    # In a process of its own: other tests make methods of theirs known in this one.
    command = [sys.executable, str(ROOT / "tools" / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_stale_pages_are_noticed() -> None:
    page = "before\n<!-- begin successor -->\nold\n<!-- end successor -->\nafter\n"
    filled = _generator().fill(page)
    assert filled.startswith("before\n<!-- begin successor -->\n\n```python\n") and filled.endswith("\nafter\n")
    assert _generator().fill(filled) == filled


def anchors(page: Path) -> set[str]:
    """What a link may name on a page: its headings, as GitHub spells them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links to files and headings of this project that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_main_path_is_short_enough_to_read() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "docs" / "navigation.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_links_that_lead_nowhere_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# What `x` is\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](other.md#what-x-is) [c](none.md) [d](other.md#no-heading) [e](https://x.org/y)")
    assert broken_links(page) == ["none.md", "other.md#no-heading"]


def test_every_page_is_reached_from_the_front_page() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) <= reached


NAMES = sorted({name for page in PAGES for name in re.findall(r"\b(?:decodery|dc)(?:\.\w+)+", page.read_text("utf-8"))})


def existing(name: str) -> bool:
    """Whether `decodery.a.b` or `dc.a.b` is a module or something in one."""
    whole = re.sub(r"^dc\b", "decodery", name)
    try:
        resolve_name(whole)
    except (ImportError, AttributeError):
        # What a module needs may not be installed here.
        module = Path(decodery.__file__).parents[1].joinpath(*whole.split("."))
        return module.with_suffix(".py").exists()
    return True


@pytest.mark.parametrize("name", NAMES)
def test_names_on_pages_exist(name: str) -> None:
    assert existing(name)
    assert not existing(name + "_gone")
