"""Sampling parameters and the types of settings: what a type checker knows is what a call takes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.llm.sampling_params import RequestSettings
from decodery.sampling.sampler import Sampler
from serving import tiny_lm

ROOT = Path(__file__).parents[3]


def test_the_types_name_what_a_request_takes() -> None:
    own = {
        name
        for function in (LLM.request, LLM.request_for, Sampler.from_settings)
        for name, each in inspect.signature(inspect.unwrap(function)).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert set(RequestSettings.__annotations__) == own - {"eos_ids", "apply_chat_template", "tokens"}
    assert {field.name for field in fields(dc.SamplingParams)} < own


def test_parameters_are_keyword_arguments_and_these_take_precedence() -> None:
    lm = tiny_lm()
    params = dc.SamplingParams(temperature=1.3, seed=5, max_new_tokens=12, top_k=20)
    one = lm.generate("abc", params, apply_chat_template=False, drafter=None)
    same = lm.generate(
        "abc", apply_chat_template=False, drafter=None, temperature=1.3, seed=5, max_new_tokens=12, top_k=20
    )
    other = lm.generate("abc", params, apply_chat_template=False, drafter=None, seed=6)
    assert isinstance(one, dc.Output) and isinstance(same, dc.Output) and isinstance(other, dc.Output)
    assert one.tokens == same.tokens != other.tokens
    assert (
        "".join(piece.text for piece in lm.stream("abc", params, apply_chat_template=False, drafter=None)) == one.text
    )
    with pytest.raises(SettingsError, match=r"is decodery\.SamplingParams"):
        lm.generate("abc", {"temperature": 1.0})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_tokens", "give max_new_tokens"),
        ("max_completion_tokens", "give max_new_tokens"),
        ("min_tokens", "give min_new_tokens"),
        ("do_sample", "give temperature, where 0 is greedy"),
        ("stop_strings", "give stop"),
        ("eos_token_id", "give stop_token_ids"),
        ("n", "give n to generate or chat"),
        ("num_return_sequences", "give n to generate or chat"),
        ("num_beams", 'call lm.search(prompt, "beam:width=4")'),
        ("guided_json", "give a constraint, such as"),
        ("response_format", "give a constraint, such as"),
        ("logits_processors", "give sampler"),
        ("assistant_model", "name a drafter, such as"),
        ("repeat_penalty", "give repetition_penalty"),
        ("topk", "try top_k"),
        ("temprature", "try temperature"),
    ],
)
def test_words_of_other_tools_are_answered_with_the_name_here(name: str, said: str) -> None:
    wrong: dict[str, Any] = {name: 1}
    lm = object.__new__(dc.LLM)
    calls = [lambda: dc.SamplingParams(**wrong), lambda: lm.request([1], **wrong)]
    if name not in ("n", "topk", "temprature"):
        calls += [lambda: lm.generate("a", **wrong), lambda: lm.chat([], **wrong), lambda: lm.stream("a", **wrong)]
    for call in calls:
        with pytest.raises(SettingsError, match=re.escape(f"there is no setting {name!r}; {said}")):
            call()


def test_a_model_is_loaded_by_name_and_not_constructed() -> None:
    for given, named in ((("smollm2",), {}), ((), {"model": "smollm2"}), (("smollm2", "int8"), {})):
        with pytest.raises(SettingsError, match=re.escape("load makes an LLM: call decodery.load('smollm2')")):
            dc.LLM(*given, **named)
    with pytest.raises(SettingsError, match="give it as the prompt"):
        object.__new__(dc.LLM).generate(prompts=["a"])  # type: ignore[call-overload]


@pytest.mark.integration
def test_a_type_checker_finds_a_wrong_setting(tmp_path: Path) -> None:
    code = tmp_path / "calls.py"
    right = [
        "lm.generate('a', dc.SamplingParams(top_p=0.9), temperature=0.5, drafter='auto', max_draft_tokens=4).text",
        "[each.text for each in lm.generate(['a', 'b'], apply_chat_template=False)]",
        "lm.generate([1, 2]).text",
        "lm.generate([{'role': 'user', 'content': 'a'}]).text",
        "next(lm.generate(iter(['a']))).text",
        "lm.chat([{'role': 'user', 'content': 'a'}], predicted_output='b').text",
        "[each.text for each in lm.chat([[{'role': 'user', 'content': 'a'}]], n=2, tools=[])]",
        "[piece.text for piece in lm.stream('a', seed=1)]",
    ]
    wrong = [
        "lm.generate('a', temprature=0.5)",
        "lm.generate('a', temperature='hot')",
        "lm.generate(['a', 'b']).text",
        "lm.generate('a', n=2).text",
        "lm.generate('a', tools=[])",
        "lm.chat('a')",
        "lm.chat([{'role': 'user', 'content': 'a'}], apply_chat_template=False)",
        "dc.SamplingParams(max_tokens=5)",
    ]
    lines = ["import decodery as dc", "lm = dc.load('smollm2')", *right, *wrong]
    code.write_text("\n".join(lines) + "\n", encoding="utf-8")
    # With the settings and the cache of `make lint`, which has just read the package.
    done = subprocess.run([sys.executable, "-m", "mypy", str(code)], capture_output=True, text=True, cwd=ROOT)
    found = {int(number) for number in re.findall(r"calls\.py:(\d+): error", done.stdout)}
    assert {lines[number - 1] for number in found} == set(wrong), done.stdout + done.stderr


def test_options_of_other_loaders_are_answered_with_the_name_here() -> None:
    for name, said in (
        ("torch_dtype", "give dtype"),
        ("load_in_8bit", 'give dtype="int8"'),
        ("device_map", "give device"),
    ):
        with pytest.raises(SettingsError, match=re.escape(f"there is no setting {name!r}; {said}")):
            dc.load("smollm2", **{name: "auto"})  # type: ignore[arg-type]
