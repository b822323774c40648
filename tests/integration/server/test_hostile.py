"""Requests made to hurt: none takes the loop, the memory or the threads of others, or is an error of the server."""

from __future__ import annotations

import asyncio
import difflib
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from decodery.constraints.tool_calls import END, MARK, read_calls
from decodery.llm.llm import LLM
from decodery.server.admission import FairThreads
from decodery.server.anthropic import Anthropic
from decodery.server.dialect import Dialect, dumps
from decodery.server.errors import ApiError
from decodery.server.fields import ChatRequest
from decodery.server.ollama import Ollama
from decodery.server.responses import Kept
from decodery.server.run import Server
from decodery.server.wire import checked, loads
from serving import SECONDS, post, serving, tiny_lm, wait_until

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


@contextmanager
def busy_readers(server: Server) -> Iterator[FairThreads]:
    """All threads that read prompts have something else to do."""
    readers, held = server.front.models.first.preprocessor._reading, threading.Event()
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(asyncio.run, readers.run(partial(held.wait, SECONDS))) for _ in range(2)]
        wait_until(lambda: readers._order.running.total() == 2)
        yield readers
        held.set()
        assert all(each.result(SECONDS) for each in busy)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings"])
def test_whoever_leaves_before_the_prompt_is_read_holds_no_place(lm: LLM, path: str) -> None:
    body = b'{"prompt": "x"}' if path != "/v1/embeddings" else b'{"input": "x"}'
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(lm) as (server, url), busy_readers(server) as readers:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: len(readers._waiting) == 1)
        wait_until(lambda: not readers._waiting)


def test_the_time_of_a_request_counts_from_its_arrival(lm: LLM) -> None:
    with serving(lm, seconds=0.2) as (server, url), busy_readers(server) as readers:
        refused = post(url)
        assert refused.status_code == 429 and "waited for all the time" in refused.json()["error"]["message"]
        assert not readers._waiting


def test_documents_beyond_the_limit_are_not_read(lm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm, "request_for", None)
    with serving(lm, max_texts=4) as (_, url):
        asked = {"query": "x" * 1000, "documents": ["y"] * 5}
        found = httpx.post(f"{url}/v1/rerank", json=asked, timeout=SECONDS)
        assert found.status_code == 400 and "5 documents, and one may have 4" in found.json()["error"]["message"]


def test_headers_are_bounded(lm: LLM) -> None:
    with serving(lm) as (_, url):
        host, _, port = url.removeprefix("http://").partition(":")
        for first in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection((host, int(port)), SECONDS / 6) as client:
                client.sendall(first + b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
                with pytest.raises(ConnectionError):
                    for number in range(64):
                        client.sendall(b"X-%d: %s\r\n" % (number, b"a" * (1 << 16)))
                    while client.recv(1 << 16):
                        # Otherwise these are all that wait for the end of the headers.
                        pass
                    raise ConnectionError
        long = {f"X-{number}": "a" * 1000 for number in range(48)}
        assert httpx.get(f"{url}/health", headers=long).status_code == 200
        assert post(url, prompt="x" * 1000, metadata="y" * (1 << 20)).status_code == 200


def test_large_requests_that_are_refused_hear_why(lm: LLM) -> None:
    with serving(lm, keys={"secret": "ann"}) as (_, url):
        for path, body in (("completions", b"x" * (3 << 20)), ("nothing", b"x" * (3 << 20))):
            found = httpx.post(f"{url}/v1/{path}", content=body, timeout=SECONDS)
            assert found.status_code in (401, 404) and found.json()["error"]["message"]


def test_responses_that_are_kept_take_the_memory_that_is_counted() -> None:
    kept, lists = Kept(), 50_000
    tracemalloc.start()
    try:
        kept.put("", {"id": "resp_1", "metadata": {"a": [[] for _ in range(lists)]}}, [{"role": "user", "content": ""}])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 3 * lists < kept._bytes[""] < 4 * lists and held < 2 * kept._bytes[""]
    assert kept.messages("", "resp_1") == [{"role": "user", "content": ""}]
    kept.drop("", "resp_1")
    assert not kept._bytes.total()


def test_no_key_loses_its_responses_to_another() -> None:
    kept, text = Kept(), "x" * (5 << 20)
    kept.put("quiet", {"id": "resp_0"}, [{"role": "user", "content": text}])
    for number in range(20):
        kept.put("loud", {"id": f"resp_{number}"}, [{"role": "user", "content": text}])
    for number in range(1100):
        kept.put("many", {"id": f"resp_{number}"}, [])
    assert kept.response("quiet", "resp_0") == {"id": "resp_0"} and kept.response("loud", "resp_19")
    assert kept.response("many", "resp_1099") and len(kept._kept) == 1024
    for owner, name in (("loud", "resp_0"), ("many", "resp_0"), ("quiet", "resp_19")):
        with pytest.raises(ApiError, match="never stored, or is gone"):
            kept.response(owner, name)


@pytest.mark.parametrize("dialect", [Anthropic(), Ollama(chat=True)])
def test_numbers_of_a_models_calls_that_nobody_can_read_stay_texts(dialect: Dialect) -> None:
    written = '{"most": 1e999, "id": ' + "9" * 5000 + ', "n": 3, "x": 0.5}'
    said, (read,) = read_calls(f'{MARK}\n{{"name": "f", "arguments": {written}}}\n{END}')
    assert not said and json.loads(read.arguments)["id"] == "9" * 5000
    call = {"id": "call", "type": "function", "function": {"name": "f", "arguments": read.arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"id": "a", "created": 0, "model": "tiny", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    found = dialect.whole(answer | {"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    assert b'"most":"1e999"' in dumps(found) and b'"n":3,"x":0.5' in dumps(found)
