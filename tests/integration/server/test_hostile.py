"""Requests made to hurt: none takes the loop, the memory or the threads of others, and none is an error of the server."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from decodery.llm.llm import LLM
from decodery.server.errors import ApiError
from decodery.server.fields import ChatRequest
from decodery.server.wire import checked, loads
from serving import SECONDS, serving, tiny_lm

MESSAGES = '"messages": [{"role": "user", "content": "x"}], "max_tokens": 2'
DEEP = "[" * 500 + "]" * 500


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


@pytest.fixture(scope="module")
def url(lm: LLM) -> Iterator[str]:
    with serving(lm) as (_, url):
        yield url


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/responses", '{"input": "x", "max_output_tokens": 2, "metadata": {"a": 1e400}}', "1e400 is too large"),
        ("/v1/responses", f'{{"input": "x", "max_output_tokens": 2, "metadata": {{"a": {DEEP}}}}}', "nested too deep"),
        ("/v1/chat/completions", f'{{{MESSAGES}, "chat_template_kwargs": {{"a": {DEEP}}}}}', "nested too deep"),
        ("/v1/chat/completions", f'{{{MESSAGES}, "chat_template_kwargs": {{"a": -1e999}}}}', "-1e999 is too large"),
    ],
)
def test_what_no_answer_could_hold_is_refused(url: str, path: str, body: str, said: str) -> None:
    found = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"}, timeout=SECONDS)
    assert found.status_code == 400 and said in found.json()["error"]["message"]


def test_requests_may_be_as_deep_as_schemas_are() -> None:
    assert loads("[" * 100 + "]" * 100) and loads(b'{"a": [1e308, {"b": {}}]}') == {"a": [1e308, {"b": {}}]}
    for text in ("[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101):
        with pytest.raises(RecursionError):
            loads(text)


def test_unknown_fields_cost_little_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {f"stuptuo_derutcurts{number}": 1 for number in range(1000)}
    compared, compare = list[str](), difflib.get_close_matches

    def counted(name: str, *rest: Any, **more: Any) -> list[str]:
        compared.append(name)
        return compare(name, *rest, **more)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    given = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert len(checked(given, ChatRequest, strict=False).ignored) == 1000 and len(compared) <= 64
    with pytest.raises(ApiError, match="did you mean messages"):
        checked({"mesages": [], **fields}, ChatRequest, strict=False)
