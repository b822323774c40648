"""`LLM.chat`: one conversation or several, with tools where the template takes them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import decodery as dc
from decodery.core.errors import PromptError, SettingsError
from serving import KNOWS_TOOLS, TOOLS, tiny_lm

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}


def test_one_conversation_gives_an_output_and_several_a_list() -> None:
    lm = tiny_lm()
    alone, others = lm.chat(HELLO, **SETTINGS), lm.chat([HELLO, TURNS], **SETTINGS)
    assert isinstance(alone, dc.Output) and isinstance(others, list)
    assert [each.tokens for each in others] == [alone.tokens, lm.generate(TURNS, **SETTINGS).tokens]
    assert alone.tokens == lm.generate("hello", **SETTINGS).tokens
    drawn = lm.chat([HELLO], dc.SamplingParams(temperature=1.0, seed=3), n=2, **SETTINGS)
    assert isinstance(drawn, list) and [each.seed for each in drawn] == [3, 4]
    assert lm.chat(HELLO, return_cache=True, **SETTINGS).kept is not None
    assert isinstance(lm.chat(HELLO, n=2, **SETTINGS), list)


def test_tools_reach_the_template() -> None:
    lm = tiny_lm(KNOWS_TOOLS)
    text = lm.tokenizer.decode(lm.chat(HELLO, tools=TOOLS, max_new_tokens=1).prompt_tokens, special=True)
    assert text.startswith("weather;now;") and "hello" in text
    described = tiny_lm().chat(HELLO, tools=TOOLS, max_new_tokens=1).prompt_tokens
    assert '<tools>\n{"name": "weather"' in lm.tokenizer.decode(described, special=True)


def test_tools_are_called_and_their_results_go_on() -> None:
    lm = tiny_lm()
    output = lm.chat(HELLO, tools=TOOLS, tool_choice="now", max_new_tokens=120)
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("now", "{}")] and output.content == ""
    free = lm.chat(HELLO, tools=TOOLS, max_new_tokens=6)
    assert free.content == free.text and not free.tool_calls and not free.reasoning
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    turns = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "12"}]
    prompt = lm.tokenizer.decode(lm.encode(turns, tools=TOOLS), special=True)
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\n12\n</tool_response>" in prompt
    none = lm.chat(HELLO, tools=TOOLS, tool_choice="none", max_new_tokens=6)
    assert none.tokens == lm.chat(HELLO, max_new_tokens=6).tokens
    with pytest.raises(SettingsError, match="tool_choice names 'then', which is no tool here"):
        lm.chat(HELLO, tools=TOOLS, tool_choice="then")
    with pytest.raises(SettingsError, match="tool_choice='now' chooses among tools: give tools"):
        lm.chat(HELLO, tool_choice="now")
    with pytest.raises(SettingsError, match="thinking_token_budget is a number of tokens, 0 or more, not -3"):
        lm.chat(HELLO, thinking_token_budget=-3)
    with pytest.raises(SettingsError, match="beside tools an answer follows a JSON schema"):
        lm.chat(HELLO, tools=TOOLS, constraint="regex:pattern=a")


@pytest.mark.parametrize("given", ["hello", ["hello"], [[1, 2]], [], 5, {"role": "user", "content": "x"}, [HELLO, "x"]])
def test_what_is_no_conversation_is_refused(given: Any) -> None:
    with pytest.raises(PromptError, match=re.escape('chat takes messages such as [{"role": "user"')):
        tiny_lm().chat(given)


def test_a_model_without_a_template_is_refused() -> None:
    lm = tiny_lm(None)
    for call in (lm.chat, lm.generate):
        with pytest.raises(SettingsError, match="no chat template, so it takes no chat messages: give generate a text"):
            call(HELLO)
    with pytest.raises(SettingsError, match="leave out apply_chat_template, or give a text"):
        tiny_lm().generate(HELLO, apply_chat_template=False)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "usr", "content": "a"}, "message 1 has the role 'usr': give user, assistant, system or tool"),
        ({"content": "a"}, "message 1 has the role None"),
        ({"role": "user"}, "message 1 has no content: give the text that the user says"),
        ({"role": "user", "content": 5}, "the content of message 1 is a text or a list of parts, not int"),
    ],
)
def test_a_message_that_means_nothing_is_refused_by_its_number(message: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptError, match=re.escape(said)):
        tiny_lm().chat([*HELLO, message], **SETTINGS)


def test_a_role_that_the_template_names_is_one_of_its_own() -> None:
    lm = tiny_lm("{% for m in messages %}{% if m.role == 'judge' %}!{% endif %}{{ m.content }}{% endfor %}")
    assert lm.tokenizer.decode(lm.encode([{"role": "judge", "content": "a"}])) == "!a"
