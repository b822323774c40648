"""The help of every command: groups, headings, examples that are usage, and 80 columns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from commands import inside
from decodery.cli.command import Command, Group
from decodery.cli.main import SECTIONS, cli


def every(command: click.Command = cli, above: click.Context | None = None, name: str = "decodery") -> Iterator[tuple]:
    """A command and all below it: its words, itself and its context."""
    context = click.Context(command, parent=above, info_name=name, terminal_width=80)
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from every(found, context, inner)


COMMANDS = list(every())


def test_the_first_screen_says_what_it_is_and_shows_five_commands_with_examples() -> None:
    code, shown, errors = inside()
    assert (code, errors) == (0, "") and shown == inside("--help")[1]
    what, start = re.split(r"\nStart here:\n", shown)
    assert len(what.strip().splitlines()) == 4
    first = start.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first[::2]] == list(SECTIONS["Start here"])
    assert len(first) == 10 and all(line.strip().startswith("decodery ") for line in first[1::2])
    assert list(SECTIONS) == ["Start here", "Run", "Serve", "Measure", "Train", "More"]


@pytest.mark.parametrize(("path", "command", "context"), COMMANDS, ids=[each[0] for each in COMMANDS])
def test_help_fits_80_columns_and_ends_with_an_example(
    path: str, command: click.Command, context: click.Context
) -> None:
    shown = command.get_help(context)
    assert isinstance(command, Command | Group)
    # Examples are lines to copy; they are not wrapped.
    text, _, examples = shown.partition("\nExample:\n")
    assert max(map(len, text.splitlines())) <= 80, text
    assert "Options:" not in text
    # The first screen has an example at each command.
    assert command.example or command is cli
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag:
            # A default stands in brackets after the help.
            assert option.show_default or not isinstance(option.get_default(context), str | int | float), option.name
            assert not re.search(r"\((none|\d+|coupled)\)\.?$", option.help or ""), option.name
    if isinstance(command, Command):
        assert examples.startswith(f"  {path} ") or examples.startswith(f"  {path}\n"), examples


EXAMPLES = [line for _, command, _ in COMMANDS for line in command.example.splitlines()]
EXAMPLES += [entry.example for section in SECTIONS.values() for entry in section.values() if entry.example]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_usage(example: str) -> None:
    arguments = shlex.split(example)
    command, context = cli, click.Context(cli, info_name="decodery")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command, context = found, click.Context(found, parent=context)
    try:
        command.make_context(command.name, arguments, parent=context.parent)
    except click.BadParameter as error:
        # The files it names are the reader's.
        assert "does not exist" in str(error), error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "Hi", "--max-tokens", "3"), "no option is called '--max-tokens': give --max-new-tokens"),
        (("generate", "Hi", "--n-predict", "3"), "'--n-predict': give --max-new-tokens"),
        (("generate", "Hi", "--top_k", "3"), "'--top_k': give --top-k"),
        (("generate", "Hi", "--temp", "1"), "'--temp': give --temperature"),
        (("chat", "--num-beams", "4"), "no option is called '--num-beams'"),
        (("stego", "hide"), "no command is called 'hide': `decodery stego --help` lists them"),
        (("stego", "encode", "Hi"), "Missing option '--message'"),
        (("stego", "decode", "Hi", "--length", "0"), "0 is not in the range x>=1"),
        (("compress-modl",), "no command is called 'compress-modl': did you mean compress-model"),
        (("compress-model", "smollm2", "--out", "copy"), "Missing option '--with'"),
        (("compress-text", "no-such-file"), "File 'no-such-file' does not exist"),
        (("decompress-text", "no-such-file"), "File 'no-such-file' does not exist"),
        (("train", "lexical-unit", "--out", "x"), "did you mean lexical-units"),
        (("train", "direction"), "Missing option '--out'"),
        (("train", "kv-bottleneck", "--out", "x"), "Missing argument 'FILES...'"),
        (("train", "ngram-cache", "--out", "x", "--texts", "many"), "'many' is not a valid integer"),
        (("train", "adadec-thresholds"), "Missing argument 'SOLUTIONS'"),
        (("train", "kv", "lserv"), "did you mean lserve"),
    ],
)
def test_wrong_input_is_named_in_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    code, output, errors = inside(*arguments)
    assert (code, output) == (2, "") and said in errors
    *usage, last = errors.strip().splitlines()
    assert last.startswith("Error: ") and sum(line.startswith("Error") for line in usage) == 0
