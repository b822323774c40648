"""What may be given as a prompt or a setting: whatever is unambiguous, and one sentence for the rest."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import decodery as dc
from decodery.cli.given import given, read_prompt
from decodery.cli.main import _require_streams, main
from decodery.constraints import Grammar
from decodery.core.conversation import PromptTokens
from decodery.core.errors import ConstraintError, PromptError, SettingsError
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.llm.prompts import one, single
from serving import tiny_lm, user

SHORT: dict[str, Any] = {"max_new_tokens": 3}


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.tokens for output in outputs]


def test_token_ids_are_a_prompt(lm: LLM) -> None:
    expected = lm.generate([104, 105], **SHORT)
    assert expected.prompt_tokens == [104, 105]
    for ids in ((104, 105), np.array([104, 105]), torch.tensor([104, 105]), np.array([104, 105], dtype=np.uint8)):
        assert lm.generate(ids, **SHORT).tokens == expected.tokens
        assert lm.encode(ids) == [104, 105]
    assert expected.tokens == lm.generate("hi", apply_chat_template=False, **SHORT).tokens


@pytest.mark.parametrize(
    "several",
    [("hi", "ho"), ["hi", "ho"], np.array(["hi", "ho"]), [user("hi"), user("ho")], [user("hi"), "ho"]],
)  # fmt: skip
def test_several_prompts_are_any_list_of_prompts(lm: LLM, several: Any) -> None:
    expected = [lm.generate(text, **SHORT).tokens for text in ("hi", "ho")]
    assert tokens_of(lm.generate(several, **SHORT)) == expected
    assert tokens_of(lm.generate(iter(several), **SHORT)) == expected
    assert tokens_of(lm.generate((prompt for prompt in several), **SHORT)) == expected
    assert tokens_of(lm.generate(np.array([[104, 105], [104, 111]]), **SHORT)) == [
        lm.generate(ids, **SHORT).tokens for ids in ([104, 105], [104, 111])
    ]
    assert lm.generate([], **SHORT) == []


@pytest.mark.parametrize("wrong", [123, None, b"hi", 1.5, {"role": "user", "content": "hi"}, {"hi"}, ["hi", 3], [1.5]])
def test_what_is_no_prompt_is_said_in_one_sentence(lm: LLM, wrong: Any) -> None:
    with pytest.raises(PromptError, match=r"a prompt is a text, chat messages .* or token ids, or several"):
        lm.generate(wrong, **SHORT)


def test_one_prompt_is_needed_where_one_text_is_written(lm: LLM) -> None:
    with pytest.raises(PromptError, match="one prompt is needed here"):
        next(lm.stream(["hi", "ho"]))
    with pytest.raises(PromptError, match="the prompt is empty"):
        lm.encode("")
    with pytest.raises(PromptError, match="one prompt is needed here"):
        lm.encode([])


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (["a", "b"], r"a list is no constraint: give Choice\(\['a', 'b'\]\)"),
        (int, r"a type is no constraint: give PythonType\(int\), whose parse reads the text"),
        (dict[str, int], r"a type is no constraint: give PythonType\("),
    ],
)
def test_what_describes_a_constraint_is_answered_with_the_constraint(lm: LLM, constraint: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        lm.generate("hi", constraint=constraint, **SHORT)


def test_settings_may_be_scalars_of_numpy(lm: LLM) -> None:
    own = {"max_new_tokens": 5, "temperature": 0.5, "seed": 7, "ignore_eos": True, "logit_bias": {3: 0.25}}
    theirs = {"max_new_tokens": np.int64(5), "temperature": np.float32(0.5), "seed": np.uint64(7)}
    theirs |= {"ignore_eos": np.bool_(True), "logit_bias": {np.int32(3): np.float16(0.25)}}
    theirs |= {"stop_token_ids": np.array([1]), "top_k": np.int8(0)}
    assert lm.generate("hi", **theirs).tokens == lm.generate("hi", **own).tokens
    assert dc.sampling.TopK(np.int64(5)) == dc.sampling.TopK(5) and type(dc.sampling.TopK(k=np.int64(5)).k) is int
    assert type(Request([0], max_new_tokens=np.int64(3)).max_new_tokens) is int


def test_a_schema_may_be_a_dict_and_a_grammar_has_rules(lm: LLM) -> None:
    out = lm.generate("hi", constraint={"const": 42}, max_new_tokens=9)
    assert out.text == "42"
    with pytest.raises(ConstraintError, match=r"begins with '\{' and has no rules"):
        lm.generate("hi", constraint=Grammar(' { "a": 1 }'))


def test_a_file_may_begin_with_a_mark_of_its_byte_order(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"const": 42}), encoding="utf-8-sig")
    assert given({"json_schema": file})["constraint"].schema == '{"const": 42}'


def test_closed_streams_are_said_or_stood_in_for() -> None:
    errors = io.StringIO()
    with mock.patch.multiple(sys, stdout=None, stderr=errors), pytest.raises(SystemExit) as left:
        main(["generate", "Hi", "-m", "nowhere"])
    assert left.value.code == 1 and errors.getvalue().startswith("decodery: standard output is closed")
    output = io.StringIO()
    with mock.patch.multiple(sys, stdin=None, stderr=None, stdout=output), pytest.raises(SystemExit) as left:
        main(["generate", "--json", "--logprobs"])
    assert left.value.code == 2
    with mock.patch.multiple(sys, stdin=None, stderr=None, stdout=output), pytest.raises(PromptError):
        _require_streams()
        tiny_lm().encode(read_prompt(None))


def test_encoded_prompts_keep_the_turns_they_were_made_of() -> None:
    tokens = PromptTokens([1, 2, 3], [(1, 2)])
    assert single(tokens) is tokens and one(tokens).user_spans == ((1, 2),)
