"""Methods are said to be ready on a model exactly where a request with their defaults is taken."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch

import decodery
from commands import inside
from decodery.cli.main import cli
from decodery.core.errors import SettingsError
from decodery.core.registry import methods
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.readiness import readiness, slower
from decodery.server.offered import offered
from decodery.testing import tiny_transformer
from tiny_models import make_model, save

MODEL = tiny_transformer(0)
FAMILIES = (
    "drafter",
    "acceptance-rule",
    "draft-length",
    "logits-processor",
    "logits-source",
    "cache-policy",
    "monitor",
)


def test_what_is_ready_writes_and_what_is_not_says_why() -> None:
    found = readiness((each for family in FAMILIES for each in methods(family)), MODEL)
    assert {family for family, _ in found} == set(FAMILIES)
    drafters = {name: requirements for (family, name), requirements in found.items() if family == "drafter"}
    ready = [name for name, requirements in drafters.items() if not requirements]
    assert {"auto", "ngram", "prompt-lookup", "suffix-tree"} <= set(ready)
    engine = Engine(MODEL)
    for name in ready:
        # What suits the model is settled when a text begins; nothing that was ready refuses it then.
        engine.submit(Request([1, 2, 3], max_new_tokens=2, drafter=name))  # type: ignore[arg-type]
    engine.run([])
    assert "decodery train head -m MODEL --kind eagle-3 --out DIR" in drafters["eagle-3"]
    assert drafters["rest"].startswith("it needs datastore, as in rest:datastore=...; it is a datastore made by `")
    assert (
        not found["acceptance-rule", "cntp"]
        and not found["cache-policy", "h2o"]
        and "train kv" in found["cache-policy", "coprocessor"]
    )


def test_the_index_says_what_is_ready_without_trying_it() -> None:
    found = {(each.family, each.name): each for family in FAMILIES for each in methods(family)}
    tried = {key for key, requirements in readiness(found.values(), MODEL).items() if not requirements}
    # The shipped part of this monitor is for deeper models than the tiny one.
    assert {key for key, each in found.items() if each.ready} - tried == {("monitor", "context-awareness")}
    assert tried <= {key for key, each in found.items() if each.ready}


def test_commands_that_methods_need_have_all_that_they_ask_for() -> None:
    found = readiness((each for family in FAMILIES for each in methods(family)), MODEL)
    advised = {key: re.findall(r"decodery (train [^`,]+)", requirements) for key, requirements in found.items()}
    made = {
        ("drafter", "rest"),
        ("acceptance-rule", "judge"),
        ("draft-length", "specdec++"),
        ("logits-source", "partial-attention"),
    }
    assert all(
        advised[key]
        for key in {*made, ("cache-policy", "lserve"), ("drafter", "deer"), ("logits-source", "controlled-decoding")}
    )
    for key, texts in advised.items():
        for text in texts:
            command: click.Command = cli
            context, words = click.Context(cli), shlex.split(text)
            while isinstance(command, click.Group):
                below = command.get_command(context, words.pop(0))
                assert below is not None, (key, text)
                command, context = below, click.Context(below, parent=context)
            given, _, _ = command.make_parser(context).parse_args(words)
            values = {name: value for name, value in given.items() if isinstance(value, str | tuple) and value}
            lacking = [each.name for each in command.params if each.required and each.name not in values]
            assert not lacking, (key, text, lacking)


def test_a_server_says_what_its_methods_need() -> None:
    requirements = {(each["family"], each["name"]): each["requirements"] for each in offered(trust=True, model=MODEL)}
    assert requirements["drafter", "prompt-lookup"] is None and "train head" in requirements["drafter", "medusa"]
    late = {each["name"] for each in offered(trust=True, model=MODEL) if each["slower"]}
    assert {"token-recycling", "jacobi", "lookahead"} < late and not late & {"auto", "prompt-lookup", "suffix-tree"}


def test_a_server_names_no_path_in_what_its_methods_need(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "secret")
    listed = offered(trust=True, model=decodery.load(str(folder), dtype="float32").model)
    assert any("-m MODEL" in (each["requirements"] or "") for each in listed) and "secret" not in json.dumps(listed)


def test_what_is_slower_on_a_cpu_is_not_on_other_devices() -> None:
    (found,) = (each for each in methods("drafter") if each.name == "jacobi")
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    assert slower(found, MODEL) and not slower(found, elsewhere)  # type: ignore[arg-type]


def test_advice_names_the_model_that_was_given(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "own model")
    lm = decodery.load(str(folder), dtype="float32")
    with pytest.raises(SettingsError) as refused:
        lm.generate("Hi", apply_chat_template=False, drafter="eagle-3")
    assert f"train head -m {shlex.quote(str(folder))} --kind eagle-3 --out DIR" in str(refused.value)
    _, shown, _ = inside("methods", "-m", str(folder), "--json")
    listed = {(each["family"], each["name"]): each["requirements"] for each in json.loads(shown)}
    assert listed["drafter", "ngram"] is None and str(folder) in listed["drafter", "eagle"]
