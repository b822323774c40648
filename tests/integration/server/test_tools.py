"""Answers that follow a schema and calls of tools, asked by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from serving import KNOWS_TOOLS, TOOLS, client, serving, tiny_lm, user

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def api() -> Iterator[OpenAI]:
    with serving(tiny_lm()) as (_, address):
        yield client(address)


def test_answers_follow_their_schema(api: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user("who?"), "max_tokens": 300, "temperature": 1.0}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    for seed in range(4):
        found = api.chat.completions.create(**asked, seed=seed, response_format=wanted)
        assert found.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(found.choices[0].message.content or ""), PERSON)
    plain = api.chat.completions.create(
        **asked, response_format={"type": "json_object"}, logit_bias={str(ord("}")): 30.0}
    )
    assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)


def test_calls_of_tools_always_parse(api: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user("weather?"), "max_tokens": 250, "temperature": 1.0}
    called = set()
    for seed in range(4):
        # What begins the name decides the tool.
        asked["logit_bias"] = {str(ord("nw"[seed % 2])): 8.0}
        found = api.chat.completions.create(**asked, seed=seed, tools=TOOLS, tool_choice="required")
        (choice,) = found.choices
        assert choice.finish_reason in ("tool_calls", "length")
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            called.add(call.function.name)
            arguments = json.loads(call.function.arguments)
            if call.function.name == "weather":
                jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
        chunks = list(api.chat.completions.create(**asked, seed=seed, tools=TOOLS, tool_choice="required", stream=True))
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [(each.function.name, each.function.arguments) for each in deltas if each.function] == [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
    assert called == {"weather", "now"}
    del asked["logit_bias"]
    named = api.chat.completions.create(
        **asked, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    calls = named.choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls if call.type == "function"] == ["weather"]


def test_only_allowed_tools_are_called(api: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
    now = {"type": "function", "function": {"name": "now"}}
    # Free to choose, the model calls the other one.
    bias = {"max_tokens": 250, "temperature": 1.0, "logit_bias": {str(ord("w")): 30.0}}
    called = {}
    for name, choice in (
        ("any", "required"),
        ("some", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [now]}}),
    ):
        found = api.chat.completions.create(**asked, **bias, messages=user("now?"), tool_choice=choice, logprobs=False)
        calls = found.choices[0].message.tool_calls or []
        called[name] = {call.function.name for call in calls if call.type == "function"}
    assert called["any"] != {"now"} == called["some"]
    flat = [{"type": "function", "name": each["function"]["name"]} for each in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    response: Any = api.responses.create(
        model="tiny", input="now?", tools=flat, tool_choice=choice, max_output_tokens=250, temperature=1.0
    )
    assert [item.name for item in response.output if item.type == "function_call"][:1] == ["now"]


def test_a_text_that_calls_no_tool_is_what_it_is_without(api: OpenAI) -> None:
    messages = user("weather?")
    tools = "{...}"
    found = api.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=60, temperature=1.0)
    told = httpx.post(str(api.base_url).replace("/v1/", "/tokenize"), json={"messages": messages}).json()
    assert found.usage is not None and found.usage.prompt_tokens > told["count"] + len(tools)
    assert found.choices[0].message.tool_calls is None and found.choices[0].message.content
    without = api.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=60, temperature=1.0
    )
    assert without.usage is not None and without.usage.prompt_tokens == told["count"]


def test_templates_that_know_tools_are_given_them() -> None:
    with serving(tiny_lm(KNOWS_TOOLS)) as (_, url):
        found = client(url).chat.completions.create(model="tiny", messages=user("x"), tools=TOOLS, max_tokens=3)
        plain = client(url).chat.completions.create(model="tiny", messages=user("x"), max_tokens=3)
    assert found.usage is not None and plain.usage is not None
    assert found.usage.prompt_tokens == plain.usage.prompt_tokens + len("weather;now;")


def test_conversations_with_calls_are_rendered(api: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    found = httpx.post(str(api.base_url).replace("/v1/", "/tokenize"), json={"messages": messages}).json()
    text = httpx.post(str(api.base_url).replace("/v1/", "/detokenize"), json={"tokens": found["tokens"]}).json()[
        "prompt"
    ]
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert api.chat.completions.create(model="tiny", messages=messages, max_tokens=3).choices[0].message.content
