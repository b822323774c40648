"""The commands that the documentation shows: all are valid, their files exist, and those that take no training run."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

import decodery
from commands import inside
from decodery.cli.main import cli
from decodery.models.loaders.package_index import pull

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
BLOCKS = [
    (page, block) for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
]
_COMMAND = re.compile(r"(?m)^(?:[^#\n]*\| *)?decodery ((?:'[^'\n]*'|\"[^\"\n]*\"|[^\\\n|>]|\\\n)*)")


def _shown() -> dict[str, list[str]]:
    """The arguments of every command of the pages, by a name; a command that is shown again is left out."""
    found = dict[str, list[str]]()
    for page, block in BLOCKS:
        for match in _COMMAND.finditer(block):
            arguments = shlex.split(match[1].replace("\\\n", " "), comments=True)
            if arguments not in found.values():
                found[f"{'-'.join(page.relative_to(ROOT).with_suffix('').parts)}-{len(found)}"] = arguments
    return found


SHOWN = _shown()
MODELS = dict.fromkeys(
    ("MODEL", "big.gguf", "path/to/model.gguf", "path/to/model-Q4_K_M.gguf", "path/to/folder"), "smollm2"
)
"""What stands for the models of a reader."""
RUN = {"generate", "methods", "info", "stego", "compress-text", "decompress-text"}
"""Commands that answer within seconds."""
MADE = {after for _, block in BLOCKS for after in re.findall(r"--out (\S+)", block)}
"""What other commands make. Tests of training use such parts."""
PLACEHOLDER = re.compile(r"\b(FOLDER|DIR|FILE|LLAVA|t5-small|prm\.safetensors|begun\.py)\b|\$\(")
"""A reader's own models and files."""
SLOW = ("archon", "iad:", "smc:")
"""Searches of several seconds, which have tests of their own."""
FILES = {
    "schema.json": '{"enum": ["Rome", "Oslo"]}',
    "notes.txt": "The tower is in Paris.\n\nThe bridge is in Rome.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name."""
    pull("smollm2")
    folder = tmp_path_factory.mktemp("reader")
    for name, text in FILES.items():
        (folder / name).write_text(text, "utf-8")
    shutil.copytree(ROOT / "examples", folder / "examples")
    first = re.search(r"```py\n(.*?)```", (ROOT / "docs" / "extending.md").read_text("utf-8"), re.DOTALL)
    assert first is not None
    (folder / "my_drafter.py").write_text(first[1], "utf-8")
    return folder


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("name", SHOWN)
def test_shown_commands_are_usage(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    command: click.Command = cli
    context = click.Context(cli)
    arguments = SHOWN[name]
    while isinstance(command, click.Group) and arguments != ["--help"]:
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command, context = found, click.Context(found, parent=context)
    try:
        command.make_context(command.name, list(arguments), parent=context.parent)
    except click.exceptions.Exit:
        pass  # --help
    except click.BadParameter as error:
        # The files it names are the reader's.
        assert "does not exist" in str(error), error


def _runs(arguments: list[str]) -> bool:
    text = " ".join(arguments)
    made = any(re.search(rf"[=: ]{re.escape(each)}(?![\w.])", text) for each in MADE)
    return arguments[0] in RUN and not made and not PLACEHOLDER.search(text) and not any(each in text for each in SLOW)


@pytest.fixture(scope="module")
def load():
    """Every model is loaded once."""
    return functools.cache(decodery.load)


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("name", [name for name, arguments in SHOWN.items() if _runs(arguments)])
def test_shown_commands_run(name: str, folder: Path, load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(decodery, "load", load)
    small = re.compile(r"small\.gguf(,(dtype|vocabulary)=\w+)?")
    arguments = [MODELS.get(each, small.sub("smollm2-draft", each)) for each in SHOWN[name]]
    if arguments[0] == "generate":
        # The last value of an option counts.
        arguments += ["--max-new-tokens", "4"]
    if arguments[:2] == ["stego", "decode"]:
        (folder / "text").write_text(inside("stego", "encode", arguments[2], *_STEGO)[1], "utf-8")
    if arguments[0] == "decompress-text" and not (folder / arguments[1]).exists():
        inside("compress-text", "notes.txt")
    code, output, errors = inside(*arguments, text="The tower is in Paris.")
    assert code == 0 and (output or errors), errors


_STEGO = ("--message", "meet at noon", "--search", "coupling:key=secret")


def test_programs_that_are_shown_exist_and_know_their_options() -> None:
    for page, block in BLOCKS:
        for program, options in re.findall(r"(?m)^(?:\w+=\S+ )*python ([\w/]+\.py)(.*)", block):
            source = ROOT / program
            assert source.is_file(), f"{page.name} shows {program}"
            known = "".join(path.read_text("utf-8") for path in [source, *source.parent.rglob("*.py")])
            assert all(f'"{option}"' in known for option in re.findall(r"(?<= )--[\w-]+", options)), program


def test_most_commands_run() -> None:
    assert sum(_runs(arguments) for arguments in SHOWN.values()) > 40
