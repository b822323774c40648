"""Commands that error messages advise: they exist, and are for the model that the user has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import decodery
from commands import inside
from decodery.cli.train import train
from decodery.core.errors import DecoderyError
from decodery.core.method_spec import from_network
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from serving import tiny_lm

PACKAGE = Path(decodery.__file__).parent
PLACEHOLDER = " -m MODEL"
ORIGIN = "my models/own.gguf"
NAMED = f"-m '{ORIGIN}'"


def own_lm() -> LLM:
    lm = tiny_lm()
    return LLM(LoadedModel(lm.model, lm.tokenizer, lm.chat_template, "own", "float64", origin=ORIGIN))


def advised() -> Iterator[tuple[str, str]]:
    """Where texts of the package, but for docstrings and needs, name commands of `decodery train`, and the commands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name in ("cli", "training"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        apart = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for each in ast.walk(tree):
            if isinstance(each, ast.keyword) and each.arg == "requirements":
                apart |= {id(inner) for inner in ast.walk(each)}
        for each in ast.walk(tree):
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in apart:
                for found in re.finditer(
                    r"decodery train ([a-z][a-z0-9-]*(?: [a-z][a-z0-9-]*)*[^`,.;:)]*)", each.value
                ):
                    yield f"{path.name}:{each.lineno}", found[1]


def test_every_advised_command_exists_and_names_the_model_where_it_takes_one() -> None:
    found = list(advised())
    assert len(found) > 60
    for place, words in found:
        command: click.Command | None = train
        for word in words.split():
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), word)
        assert command is not None, (place, words)
        takes = any("--model" in each.opts for each in command.params)
        prose = words.endswith((" made", " makes"))
        assert takes == (PLACEHOLDER in f" {words}") or prose, (place, words)


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("head", {"drafter": "eagle-3"}),
    ("draft", {"drafter": "draft-model"}),
    ("deer", {"drafter": "deer"}),
    ("hmm", {"drafter": "hmm"}),
    ("kv-bottleneck", {"drafter": "discrete-key-value"}),
    ("lexical-units", {"drafter": "lexical-unit"}),
    ("kv lserve", {"cache_policy": "lserve"}),
    ("los", {"monitor": "los"}),
    ("hamburger", {"logits_source": "hamburger"}),
    ("hyperfit", {"sampler": ["no-citation"]}),
]


@pytest.mark.parametrize(("command", "settings"), ASKED)
def test_errors_of_a_model_name_it_in_what_they_advise(command: str, settings: dict[str, Any]) -> None:
    lm = own_lm()
    for call in (lm.generate, lambda *given, **more: list(lm.stream(*given, **more)), lm.request_for):
        with pytest.raises(DecoderyError) as raised:
            call("hi", **settings)
            # A request alone is not held against the model yet.
            lm.generate("hi", **settings)
        assert f"decodery train {command} {NAMED}" in str(raised.value)
        assert "MODEL" not in str(raised.value)


def test_advice_repeats_the_settings_that_were_given() -> None:
    with pytest.raises(DecoderyError, match="as in eagle-3:length=7,head=DIR"):
        own_lm().generate("hi", drafter="eagle-3:tree_policy=none,length=7")
    with pytest.raises(DecoderyError, match="as in medusa:head=DIR"):
        own_lm().generate("hi", drafter="medusa")


def test_a_search_and_a_command_name_the_model_too() -> None:
    with pytest.raises(DecoderyError) as raised:
        own_lm().search("hi", "best-of-n:n=2,scorer=value-head(head=none.safetensors)")
    assert f"decodery train value {NAMED}" in str(raised.value)
    code, _, errors = inside("generate", "hi", "-m", ORIGIN, "--monitor", "los")
    assert code == 1 and f"`decodery train los {NAMED} QUESTIONS --out DIR`" in errors


def test_requests_from_a_network_learn_no_paths() -> None:
    with from_network(), pytest.raises(DecoderyError) as raised:
        own_lm().generate("hi", drafter="eagle-3")
    assert "decodery train head -m MODEL" in str(raised.value) and ORIGIN not in str(raised.value)


def test_what_was_loaded_is_known_by_the_name_it_was_given() -> None:
    assert decodery.load("smollm2").origin == "smollm2"
