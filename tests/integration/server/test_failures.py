"""What breaks in a server ends alone, leaves a line in the log, and is reported."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from decodery.core import registry
from decodery.core.registry import register
from decodery.llm.llm import LLM
from decodery.server.admission import FairThreads
from decodery.server.errors import ApiError
from decodery.server.run import EngineFailed, Server, serve
from decodery.server.settings import ServerSettings
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from serving import SECONDS, left_nothing, post, serving, streaming, tiny_lm, wait_until


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


class Broken(BaseException):
    """What no part of a request raises."""


@dataclass(frozen=True)
class Breaks(Drafter):
    """Breaks once a text has a few tokens; fatal: so that the engine does, too; early: when it is made."""

    fatal: bool = False
    deep: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        if self.early:
            raise ZeroDivisionError("division by zero")

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        if seq.position > 3:
            if self.deep:
                return self.propose(seq, budget)
            raise Broken("on purpose") if self.fatal else RuntimeError("on purpose")
        return DraftTree.root(seq.last_token)


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """Requests can name the drafter that breaks while these tests run."""
    register("breaks-for-tests")(Breaks)
    yield
    del registry._registered["drafter"]["breaks-for-tests"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_breaks_ends_alone(lm: LLM, stream: bool) -> None:
    with serving(lm) as (server, url):
        with streaming(url, max_tokens=300) as events:
            body = {"prompt": "x", "max_tokens": 20, "stream": stream, "decodery": {"drafter": "breaks-for-tests"}}
            broken = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
            if stream:
                said = [line for line in broken.text.split("\n\n") if line]
                assert "error" in json.loads(said[-1].removeprefix("data: ")) and "[DONE]" not in broken.text
            else:
                assert broken.status_code == 500 and "RuntimeError" in broken.json()["error"]["message"]
                assert "on purpose" not in broken.text
            rest = list(events)
            assert rest[-1] == "data: [DONE]"
        left_nothing(server)


def test_what_breaks_leaves_a_line_in_the_log(lm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lm, keys={"secret": "ann"}) as (server, url):
        broken = post(url, key="secret", max_tokens=20, decodery={"drafter": "breaks-for-tests"})
        deep = post(url, key="secret", max_tokens=20, decodery={"drafter": "breaks-for-tests:deep=true"})
        wrong = post(url, key="secret", decodery={"drafter": "no-such-drafter"})
        wait_until(lambda: server.front.service.idle)
    assert (broken.status_code, deep.status_code, wrong.status_code) == (500, 500, 400)
    assert "on purpose" not in broken.text and "RecursionError" in deep.json()["error"]["message"]
    said = [record.getMessage() for record in caplog.records if record.name == "decodery.server"]
    begun = [line.partition(" (")[0] for line in said]
    assert begun[0] == "decodery: a request of 'ann' failed: RuntimeError: on purpose"
    assert len(said) == 2 and begun[1].startswith("decodery: a request of 'ann' failed: RecursionError: ")
    assert "test_failures.py, line " in said[0] and said[0].endswith("in propose)") and "\n" not in "".join(said)


def test_what_breaks_while_a_request_is_read_leaves_a_line_too(lm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lm) as (_, url):
        assert post(url, decodery={"drafter": "breaks-for-tests:early=true"}).status_code == 500
    (line,) = [record.getMessage() for record in caplog.records if record.name == "decodery.server"]
    assert line.startswith("decodery: a request that is being read failed: ZeroDivisionError: division by zero (")


@pytest.mark.parametrize("path", ["v1/completions", "tokenize"])
def test_an_upload_that_breaks_off_leaves_no_trace(
    lm: LLM, path: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(lm) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST /{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                'Content-Length: 1000\r\n\r\n{"prompt": "x", '.encode()
            )
            wait_until(lambda: bool(server.server_state.tasks))
        wait_until(lambda: not server.server_state.tasks)
        assert post(url).status_code == 200
    assert not capfd.readouterr().err and not caplog.records


def test_an_engine_that_fails_is_reported_and_ends_the_server(lm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    urls: list[str] = []
    server = Server(lm, ServerSettings(name="tiny", drain_seconds=0.0), port=0, on_ready=urls.append)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            serve(server)
        except EngineFailed as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: bool(urls))
    server.front.service.on_failure = lambda error: None  # So that there is time to ask how it is.
    with streaming(urls[0]) as events:
        broken = post(urls[0], max_tokens=20, decodery={"drafter": "breaks-for-tests:fatal=true"})
        assert broken.status_code == 500 and "the engine failed" in broken.json()["error"]["message"]
        assert "the engine failed" in list(events)[-1]
    health = httpx.get(f"{urls[0]}/health")
    assert health.status_code == 503 and "Broken" in health.json()["error"]["message"]
    assert post(urls[0]).status_code == 503
    server._fail(server.front.service.failure or Broken())
    thread.join(SECONDS)
    assert not thread.is_alive() and "Broken" in str(failed[0])
    assert "the engine failed (Broken: on purpose)" in capfd.readouterr().err


def test_texts_that_arrive_while_an_engine_fails_are_answered_and_counted_no_more(lm: LLM) -> None:
    with serving(lm) as (server, url):
        service = server.front.service
        service.on_failure = lambda error: None
        arrived = threading.Event()

        def fails() -> None:
            arrived.set()
            wait_until(lambda: service._inbox.qsize() > 0)
            raise Broken("on purpose")

        service._turn = fails  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(post, url)
            assert arrived.wait(SECONDS)
            second = pool.submit(post, url)
            assert [each.result(SECONDS).status_code for each in (first, second)] == [500, 500]
        assert service._admission.total == 0 and service.idle


def test_what_waits_for_a_thread_hears_that_the_server_stops() -> None:
    asyncio.run(_closed_while_one_waits())


async def _closed_while_one_waits() -> None:
    threads, begun, held = FairThreads(1, "test", 60.0), threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return held.wait(SECONDS)

    running = asyncio.create_task(threads.run(slow))
    await asyncio.to_thread(begun.wait, SECONDS)
    waiting = asyncio.create_task(threads.run(lambda: True))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(ApiError, match="stop"):
        await asyncio.wait_for(waiting, SECONDS)
    held.set()
    assert await running
