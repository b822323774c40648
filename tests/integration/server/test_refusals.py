"""What the server refuses, in the form of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from decodery.llm.llm import LLM
from serving import TOOLS, client, serving, tiny_lm, user


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


@pytest.fixture(scope="module")
def url(lm: LLM) -> Iterator[str]:
    with serving(lm) as (_, address):
        yield address


@pytest.fixture(scope="module")
def api(url: str) -> OpenAI:
    return client(url)


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, "text"),
    ({"temperature": 3}, "temperature", "must be at most 2, not 3"),
    ({"temperature": "hot"}, "temperature", 'must be a number, not "hot"'),
    ({"response_format": "json"}, "response_format", 'must be an object, not "json"'),
    ({"messages": [5]}, "messages.0", "must be an object, not 5"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "must be a text or a list, not 5"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is missing"),
    ({"n": 0}, "n", "n must be at least 1, not 0"),
    ({"max_tokens": 5000}, "max_tokens", "context length is 2048 tokens. However, the request needs 50"),
    ({"messages": user("x" * 3000)}, "messages", "context length is 2048"),
    ({"messages": user("x" * 100_000)}, "messages", "100000 characters"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "no token"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "no token"),
    ({"stop": ["x", 3]}, "stop.1", "must be a text, not 3"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, None, "type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70000]}}}},
        "response_format",
        "this server takes 65536",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, None, "leave the others out"),
    ({"guided_regex": "a", "tools": TOOLS}, "tools", "no other constraint"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not 2"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "is not a field"),
    ({"use_beam_search": True}, "use_beam_search", "beam:width=4"),
    ({"priority": 3}, "priority", "keys take turns"),
    ({"cache_salt": "s"}, "cache_salt", "within a key"),
    ({"grammar": 'root ::= "a"'}, "grammar", "GBNF"),
    ({"modalities": ["text", "audio"]}, "modalities", "writes text"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"chat_template_kwargs": {"messages": []}}, None, "cannot set 'messages'"),
    (
        {"continue_final_message": True, "messages": [{"role": "user", "content": ""}]},
        None,
        "a last message with a text",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "no tool"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
    ({"decodery": {"drafter": "no-such"}}, None, "no drafter method"),
    ({"decodery": {"drafter": "rest:datastore=/etc/passwd"}}, "decodery", "not for requests from a network"),
    ({"decodery": {"drafter": "cascade:drafters=auto/rest(datastore=/x)"}}, "decodery", "not for requests"),
    ({"decodery": {"constraint": "monitor"}}, "decodery", "not for requests"),
    ({"decodery": {"search": "beam:width=100000"}}, "decodery", "more than a request may ask for"),
    ({"decodery": {"drafter": "forced:drafter=" * 3000}}, None, ""),
    ({"decodery": {"drafter": "forced(drafter=" * 3000 + "auto" + ")" * 3000}}, None, ""),
    ({"decodery": {"cache_policy": "h20"}}, None, "no cache-policy method is called"),
    ({"decodery": {"colour": "red"}}, "decodery.colour", "is not a field"),
    ({"seed": 2**64}, "seed", "at most"),
    ({"min_tokens": 5}, "min_tokens", "min_tokens is 5 and the text may have 4 tokens: give a larger max_tokens"),
    ({"temprature": 1}, "temprature", "there is no field 'temprature': did you mean temperature?"),
    ({"enable_thinking": False}, "enable_thinking", 'give chat_template_kwargs with {"enable_thinking": ...}'),
    ({"stop_sequences": ["x"]}, "stop_sequences", "there is no field 'stop_sequences': give stop"),
    ({"top_n_sigma": 1.5}, "top_n_sigma", "is not supported"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content is missing"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
        "at least 1 item",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "no"}}]},
            },
        },
        "tool_choice",
        "tool_choice allows 'no', which is no tool here",
    ),
]


@pytest.mark.parametrize(("asked", "param", "said"), REFUSED, ids=[str(asked)[:50] for asked, _, _ in REFUSED])
def test_what_is_wrong_is_said_in_openais_form(url: str, asked: dict[str, Any], param: str | None, said: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": user("x"), "max_tokens": 4, **asked})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert said in error["message"] and (param is None or error["param"] == param), error


def test_clients_see_their_own_kinds_of_error(api: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        api.chat.completions.create(model="gpt", messages=user("x"))
    with pytest.raises(openai.BadRequestError, match="context"):
        api.completions.create(model="tiny", prompt="x", max_tokens=4000)
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        api.moderations.create(input="x")
    assert [model.id for model in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").id == "tiny"


def test_requests_that_are_no_requests(url: str) -> None:
    post = httpx.Client(base_url=url, headers={"Content-Type": "application/json"}).post
    for content, status in (
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": NaN}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b"x" * (5 << 20), 413),
    ):
        answer = post("/v1/completions", content=content)
        assert answer.status_code == status and "error" in answer.json(), (content[:40], answer.text[:300])
    typed = httpx.post(f"{url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert typed.status_code == 415
    packed = post("/v1/completions", content=b"{}", headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415 and "'gzip' is not read" in packed.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/api/chat", 404, "did you mean /api/chat?"),
        ("GET", "/v1/model", 404, "did you mean /v1/models?"),
        ("GET", "/nowhere", 404, "there is no GET /nowhere here: GET /openapi.json lists all routes"),
        ("GET", "/v1/completions", 405, "there is no GET /v1/completions here: use POST"),
    ],
)
def test_a_wrong_path_is_answered_with_the_right_one(url: str, method: str, path: str, status: int, said: str) -> None:
    answer = httpx.request(method, url + path)
    assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("path", "asked", "param", "said"),
    [
        ("completions", {"messages": user("x")}, "messages", "POST /v1/chat/completions takes messages"),
        ("chat/completions", {"prompt": "x"}, "prompt", "POST /v1/completions takes a prompt"),
        ("completions", {"prompt": "x", "top_logprobs": 2}, "top_logprobs", "logprobs is the number"),
        ("completions", {"prompt": [-1]}, "prompt.0", "must be at least 0, not -1"),
        ("completions", {"prompt": 5}, "prompt", "prompt must be a text or a list, not 5"),
        ("completions", {"prompt": ""}, "prompt", "prompt must not be empty"),
        ("responses", {"input": "x", "background": True}, "background", "background must be false, not true"),
        ("responses", {"input": "x", "conversation": "c"}, "conversation", "give previous_response_id"),
        ("responses", {"input": "x", "include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
    ],
)
def test_a_field_in_the_wrong_place_is_refused_with_the_right_one(
    url: str, path: str, asked: dict[str, Any], param: str, said: str
) -> None:
    answer = httpx.post(f"{url}/v1/{path}", json=asked)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"] and answer.json()["error"]["param"] == param
