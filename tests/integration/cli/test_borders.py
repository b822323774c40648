"""Typical mistakes on the command line: each is refused in a sentence with the user's value and what to do."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from unittest import mock

import click
import pytest

import decodery
from commands import inside
from decodery.cli.decode import Screen
from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from serving import tiny_lm


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The model that commands load."""
    lm = tiny_lm()
    monkeypatch.setattr(decodery, "load", lambda *name, **settings: lm)
    return lm


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that load a model fail the test: what is wrong has to be said before."""

    def load(*name: object, **settings: object) -> LLM:
        pytest.fail("a model was loaded for a command that cannot work")

    monkeypatch.setattr(decodery, "load", load)


def refused(*arguments: str, status: int = 1, text: str = "") -> str:
    """The last line on standard error, of a command that prints nothing."""
    code, output, errors = inside(*arguments, text=text)
    assert (code, output) == (status, ""), (output, errors)
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


@pytest.mark.usefixtures("tiny")
def test_schemas_and_grammars_may_stand_in_the_command(tmp_path: Path) -> None:
    schema, grammar = '{"enum": ["ab"]}', 'start: "ab"'
    for option, text, written in (("--json-schema", schema, '"ab"'), ("--grammar", grammar, "ab")):
        (file := tmp_path / "described.txt").write_text(text)
        for value in (text, f"\n  {text}", str(file)):
            assert inside("generate", "Say it.", option, value) == (0, written + "\n", "")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "two", "words"), "'words' is one argument too many: give the prompt as one argument, in quotes"),
        (("generate", "--prompt", "x"), "no option is called '--prompt': give the prompt as one argument, in quotes"),
        (("generate", "x", "--temprature", "1"), "no option is called '--temprature': did you mean --temperature?"),
        (("generate", "x", "--n-predict", "1"), "give --max-new-tokens"),
        (("generate", "x", "--xyz"), "`decodery generate --help` lists them"),
        (
            ("info", "smollm2"),
            "'smollm2' is one argument too many: a model is an option, as in decodery info -m smollm2",
        ),
        (
            ("serve", "m.gguf"),
            "'m.gguf' is one argument too many: a model is an option, as in decodery serve -m m.gguf",
        ),
        (("pull", "a", "b"), "'b' is one argument too many: `decodery pull` takes NAME"),
        (("cache", "clean", "--most", "nan"), "'nan' is not a number"),
        (("generate", "x", "--temperature", "nan"), "'nan' is not a number"),
        (("serve", "--replicas", "2"), "--replicas needs --ray"),
        (("bench", "--methods", " , "), "there is no method in it: name some, such as none,auto"),
    ],
)
def test_wrong_usage_is_answered_with_what_was_meant(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments, status=2)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "x", "--max-new-tokens", "0"), "max_new_tokens must be an integer of at least 1, not 0"),
        (("generate", "x", "--seed", "-1"), "seed must be an integer from 0"),
        (("generate", "x", "--stop", ""), "stop must be non-empty strings"),
        (("generate", "x", "--min-new-tokens", "300"), "min_new_tokens is 300 and max_new_tokens 256"),
        (("generate", "x", "--predicted-output", "nosuch.txt"), "there is no file 'nosuch.txt'"),
        (("generate", ""), "the prompt is empty"),
        (("pull", "nosuch"), "'nosuch' is neither an embedded model (smollm2) nor a Hub id"),
        (("serve", "--tls-cert", "CERT", "--tls-key", "CERT"), "cannot serve HTTPS with"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "certificate").write_text("")
    given = [str(tmp_path / "certificate") if each == "CERT" else each for each in arguments]
    assert said in refused(*given)


def test_a_model_without_a_name_or_a_content_is_refused(tmp_path: Path) -> None:
    assert "the model's name is empty: give smollm2" in refused("generate", "x", "-m", "")
    (empty := tmp_path / "m.gguf").write_bytes(b"")
    assert f"{empty} is empty: fetch it again, or give another file" in refused("generate", "x", "-m", str(empty))


def test_a_file_that_cannot_be_used_is_named_and_a_fault_of_the_program_is_not_hidden(tmp_path: Path) -> None:
    @click.command()
    @click.argument("path")
    def touch(path: str) -> None:
        if not path:
            raise OSError("a fault")
        Path(path).write_text("")

    (folder := tmp_path / "file").write_text("")
    code, _, errors = inside(str(folder / "below"), group=touch)
    assert code == 1
    assert errors == f"decodery: cannot use {folder / 'below'} (Not a directory): check the path and its permissions\n"
    with pytest.raises(OSError, match="a fault"):
        inside("", group=touch)


def test_a_folder_that_takes_no_file_is_found_before_the_work(
    tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text := tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert f"{tmp_path} may not be written to: name another file with --out" in refused("compress-text", str(text))


def test_an_error_after_the_first_words_has_a_line_of_its_own() -> None:
    output = io.StringIO()
    with mock.patch.object(sys, "stdout", output):
        with pytest.raises(SettingsError), Screen() as screen:
            screen.write("some")
            raise SettingsError("wrong")
        with pytest.raises(SettingsError), Screen():
            raise SettingsError("wrong")
    assert output.getvalue() == "some\n"


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("--json-schema", "", "is empty: give another file to --json-schema"),
        ("--json-schema", "{", "the JSON schema is not JSON"),
        ("--grammar", "\n", "is empty: give another file to --grammar"),
    ],
)
def test_a_file_that_describes_nothing_is_named(tmp_path: Path, option: str, content: str, said: str) -> None:
    (file := tmp_path / "described.txt").write_text(content)
    message = refused("generate", "Say it.", option, str(file))
    assert str(file) in message and said in message


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("option", "advice"), [("--json-schema", "the schema itself"), ("--grammar", "the grammar itself")]
)
@pytest.mark.parametrize("value", ["nosuch.txt", ".", "C:/nosuch"])
def test_what_is_neither_a_file_nor_a_description_is_refused(option: str, advice: str, value: str) -> None:
    message = refused("generate", "Say it.", option, value, status=2)
    assert value in message and advice in message
