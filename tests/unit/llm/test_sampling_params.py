"""Sampling parameters and the types of settings: what a type checker knows is what a call takes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.llm.sampling_params import RequestSettings
from decodery.sampling.sampler import Sampler
from serving import tiny_lm


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


@pytest.mark.integration
def test_a_type_checker_finds_a_wrong_setting(tmp_path: Path) -> None:
    code = tmp_path / "calls.py"
    code.write_text(
        "import decodery as dc\n"
        "lm = dc.load('smollm2')\n"
        "lm.generate('a', dc.SamplingParams(top_p=0.9), temperature=0.5, drafter='auto', max_draft_tokens=4)\n"
        "lm.generate('a', temprature=0.5)\n"
        "lm.generate('a', temperature='hot')\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(code),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "calls.py:3" not in done.stdout and done.returncode == 1, done.stdout + done.stderr
    assert "calls.py:4" in done.stdout and "calls.py:5" in done.stdout, done.stdout
