"""Fields as other servers have them: they work at the top level, are refused by name, or are named in a header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from decodery.constraints import Choice
from decodery.llm.llm import LLM
from serving import KNOWS_TOOLS, SECONDS, TEMPLATE, TOOLS, client, serving, tiny_lm, user

TEXT = {"apply_chat_template": False, "max_new_tokens": 24}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": 3}, {"top_k": 3}),
    ({"top_k": -1}, {}),
    ({"min_p": 0.2}, {"min_p": 0.2}),
    ({"top_p": 0}, {"top_k": 1}),
    ({"typical_p": 0.5}, {"typical": 0.5}),
    ({"repeat_penalty": 1.8}, {"repetition_penalty": 1.8}),
    ({"xtc_probability": 1, "xtc_threshold": 0.001}, {"xtc": 1.0, "xtc_threshold": 0.001}),
    ({"dry_multiplier": 90.0, "dry_allowed_length": 1, "logit_bias": {"97": 9}},
     {"dry": 90.0, "dry_allowed": 1, "logit_bias": {97: 9.0}}),
    ({"mirostat": 2, "mirostat_tau": 1.0}, {"mirostat": 2, "mirostat_tau": 1.0}),
    ({"min_tokens": 12, "logit_bias": {"257": 6}}, {"min_new_tokens": 12, "logit_bias": {257: 6.0}}),
    ({"ignore_eos": True, "logit_bias": {"257": 6}}, {"ignore_eos": True, "logit_bias": {257: 6.0}}),
    ({"stop": ["", "\u0000"], "cache_prompt": True}, {}),
    ({"guided_regex": "[ab]{4}"}, {"constraint": 'regex:pattern="[ab]{4}"'}),
    ({"structured_outputs": {"choice": ["aa", "bb"]}}, {"constraint": Choice(["aa", "bb"])}),
]  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


@pytest.fixture(scope="module")
def url(lm: LLM) -> Iterator[str]:
    with serving(lm) as (_, address):
        yield address


def complete(url: str, **body: Any) -> httpx.Response:
    asked = {"prompt": "once upon", "max_tokens": 24, "temperature": 1.0, "seed": 3}
    return httpx.post(f"{url}/v1/completions", json=asked | body)


@pytest.mark.parametrize(("fields", "settings"), SAME, ids=[json.dumps(fields)[:50] for fields, _ in SAME])
def test_extensions_of_other_servers_work_at_the_top_level(
    lm: LLM, url: str, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = lm.generate("once upon", temperature=1.0, seed=3, **TEXT, **settings)
    answer = complete(url, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected.text
    assert "warning" not in answer.headers
    plain = lm.generate("once upon", temperature=1.0, seed=3, **TEXT)
    assert not settings or expected.text != plain.text


def test_fields_nobody_knows_are_named_in_a_header(url: str) -> None:
    body = {"colour": "red", "stream_options": {"include_usage": False, "other": 1}, "user": "me", "store": False}
    assert complete(url, **body).headers["warning"] == '299 decodery "ignored fields: colour, stream_options.other"'
    assert complete(url, **body, stream=True).headers["warning"].endswith('colour, stream_options.other"')
    odd = complete(url, **{'a"b\r\n': 1})
    assert odd.headers["warning"] == '299 decodery "ignored fields: a?b??"'


def test_what_openais_client_sends_for_schemas_and_streams_is_known(url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    function = {"name": "f", "parameters": schema, "strict": True}
    body = {
        "messages": user("x"),
        "max_tokens": 20,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "A", "description": "B", "schema": schema, "strict": True},
        },
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "none",
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200 and "warning" not in answer.headers, answer.text


def test_a_name_of_others_beside_the_own_one_is_only_named(url: str) -> None:
    answer = complete(url, max_tokens=4, max_new_tokens=9)
    assert answer.status_code == 200 and answer.headers["warning"].endswith('max_new_tokens"')


def test_a_completion_takes_a_response_format_as_well(lm: LLM, url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "A", "schema": schema}}
    answer = complete(url, max_tokens=99, response_format=wanted)
    assert json.loads(answer.json()["choices"][0]["text"]) == {"a": "b"} and "warning" not in answer.headers


def test_limits_that_clients_write_for_none(url: str) -> None:
    assert complete(url, max_tokens=-1, stop="", ignore_eos=True).json()["usage"]["completion_tokens"] > 0
    found = complete(url, logprobs=True).json()["choices"][0]["logprobs"]
    assert len(found["top_logprobs"][0]) in (1, 2)


def test_a_prompt_is_cut_to_its_last_tokens(lm: LLM, url: str) -> None:
    expected = lm.generate("upon", temperature=1.0, seed=3, **TEXT)
    assert complete(url, truncate_prompt_tokens=4).json()["choices"][0]["text"] == expected.text
    assert (
        complete(url, prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=1).json()["usage"]["prompt_tokens"]
        == 2047
    )


def test_prompt_logprobs_are_those_of_an_echo(url: str) -> None:
    echoed = complete(url, echo=True, logprobs=2).json()["choices"][0]["logprobs"]
    found = complete(url, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len("once upon")
    for each, logprob, letter in zip(found[1:], echoed["token_logprobs"][1:], "nce upon", strict=False):
        assert each[str(ord(letter))]["logprob"] == pytest.approx(logprob)
        assert each[str(ord(letter))]["decoded_token"] == letter
        assert sorted(entry["rank"] for entry in each.values() if entry["rank"]) == [1, 2]


def test_messages_in_forms_that_clients_send(url: str) -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never", "annotations": []},
        {"role": "assistant", "content": "", "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "12"},
        {"role": "user", "content": []},
    ]
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": said, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"].endswith('messages.annotations"')


def test_an_answer_goes_on_with_what_the_assistant_began(lm: LLM, url: str) -> None:
    begun = [*user("tides"), {"role": "assistant", "content": "The moon"}]
    prompt = "<|im_start|>user\ntides<|im_end|>\n<|im_start|>assistant\nThe moon"
    expected = lm.generate(prompt, **TEXT)
    assert lm.chat(begun, continue_final_message=True, max_new_tokens=24).text == expected.text
    asked = {"messages": begun, "max_tokens": 24, "continue_final_message": True}
    found = httpx.post(f"{url}/v1/chat/completions", json=asked).json()
    assert found["choices"][0]["message"]["content"] == expected.text
    assert lm.chat(begun, max_new_tokens=24).text != expected.text


def test_variables_reach_the_chat_template() -> None:
    lm = tiny_lm("{% if not enable_thinking %}<quiet>{% endif %}" + TEMPLATE)
    quiet, loud = (lm.encode(user("x"), chat_template_kwargs={"enable_thinking": on}) for on in (False, True))
    assert lm.tokenizer.decode(quiet, special=True) == "<quiet>" + lm.tokenizer.decode(loud, special=True)
    named = tiny_lm("{{ name }}" + TEMPLATE).encode(user("x"), chat_template_kwargs={"name": "<|im_end|>"})
    assert named.count(lm.tokenizer.encode("<|im_end|>")[0]) == 1


def test_functions_are_the_older_form_of_tools() -> None:
    with serving(tiny_lm(KNOWS_TOOLS)) as (_, address):
        api: OpenAI = client(address)
        functions = [tool["function"] for tool in TOOLS]
        asked: dict[str, Any] = {"model": "tiny", "messages": user("now?"), "max_tokens": 250, "temperature": 1.0}
        found = api.chat.completions.create(**asked, functions=functions, function_call={"name": "now"})
        (choice,) = found.choices
        assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
        assert choice.message.function_call is not None and choice.message.function_call.name == "now"
        chunks = api.chat.completions.create(**asked, functions=functions, function_call={"name": "now"}, stream=True)
        calls = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
        assert [call.name for call in calls] == ["now"]


def test_tools_and_a_response_format_go_together() -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}
    with serving(tiny_lm(KNOWS_TOOLS)) as (_, address):
        api: OpenAI = client(address)
        asked: dict[str, Any] = {"model": "tiny", "messages": user("now?"), "max_tokens": 250, "temperature": 1.0}
        asked |= {"tools": TOOLS, "response_format": wanted, "parallel_tool_calls": False}
        forms = set()
        for sign in "{<":
            found = api.chat.completions.create(**asked, logit_bias={str(ord(sign)): 30.0, str(ord("n")): 20.0})
            (choice,) = found.choices
            forms.add(choice.finish_reason)
            if choice.finish_reason == "stop":
                assert json.loads(choice.message.content or "")["mood"] in ("good", "bad")
            else:
                assert choice.message.tool_calls
        assert forms == {"stop", "tool_calls"}


def test_a_stop_string_ends_what_may_end_anywhere() -> None:
    """Text beside tools, a bound reasoning part, and patterns, as other servers have it."""
    with serving(tiny_lm(KNOWS_TOOLS + "{# </think> #}")) as (_, url):

        def said(stop: str | None, **more: Any) -> dict[str, Any]:
            asked = {"messages": user("?"), "max_tokens": 30, "temperature": 1.0, "seed": 3}
            answer = httpx.post(f"{url}/v1/chat/completions", json={**asked, "stop": stop, **more}, timeout=SECONDS)
            assert answer.status_code == 200 and "warning" not in answer.headers, answer.text
            return answer.json()["choices"][0]  # type: ignore[no-any-return]

        for more in ({"tools": TOOLS}, {"thinking_token_budget": 4}, {"guided_regex": "[a-z]{30}"}):
            whole = said(None, **more)["message"]["content"]
            stop = next(letter for letter in whole[4:] if letter.isalnum())
            found = said(stop, **more)
            assert found["message"]["content"] == whole[: whole.index(stop)]
            assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_a_stop_string_does_not_end_json_before_its_end() -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    with serving(tiny_lm()) as (_, url):
        asked = {"messages": user("?"), "max_tokens": 99, "stop": ["mood", "}"], "guided_json": schema}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked)
    (choice,) = answer.json()["choices"]
    assert json.loads(choice["message"]["content"])["mood"] in ("good", "bad") and choice["finish_reason"] == "stop"
    assert answer.headers["warning"].endswith('stop"')
