"""Limits of a server: one client holds up no other, nothing is left after a request, and the end is in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.server.connections import TimedProtocol
from decodery.server.fair import FairQueue
from decodery.server.keys import Keys, read_keys
from serving import LONG, SECONDS, client, left_nothing, post, serving, streaming, tiny_lm, user, wait_until

WRITTEN = "decodery_generation_tokens_total{"


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


def test_what_does_not_fit_the_queue_is_told_when_to_come_back(lm: LLM) -> None:
    with serving(lm, max_running=1, max_queue=1) as (server, url):
        with streaming(url):
            waiting = threading.Thread(target=post, args=(url,))
            waiting.start()
            wait_until(lambda: server.front.service.full)
            refused = post(url)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert httpx.get(f"{url}/ready").status_code == 503 and httpx.get(f"{url}/health").status_code == 200
            with pytest.raises(openai.RateLimitError):
                client(url).completions.create(model="tiny", prompt="x")
            assert post(url, n=3).status_code == 400
        waiting.join(SECONDS)
        wait_until(lambda: server.front.service.idle)
        assert post(url).status_code == 200 and httpx.get(f"{url}/ready").status_code == 200


def test_keys_are_asked_for_and_bounded_each(lm: LLM) -> None:
    with serving(lm, keys={"secret-a": "a", "secret-b": "b"}, max_texts_per_key=2) as (server, url):
        assert [post(url, key=key).status_code for key in ("", "wrong", "secret-a")] == [401, 401, 200]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        body: dict[str, Any] = {"prompt": "x", "max_tokens": LONG, "stream": True, "n": 2}
        body["ignore_eos"] = True
        headers = {"Authorization": "Bearer secret-a"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=SECONDS) as answer:
            assert answer.status_code == 200
            assert post(url, key="secret-a").status_code == 429
            assert post(url, key="secret-b").status_code == 200
        wait_until(lambda: server.front.service.idle)
        # What one key has read is not shown to another, not even by how long it takes.
        beginning = "a beginning of some length that both of them send"
        cached = [
            post(url, key=key, prompt=beginning).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in ("secret-a", "secret-a", "secret-b", "secret-b")
        ]
        assert cached[0] == cached[2] == 0 and cached[1] == cached[3] == len(beginning) - 1


def test_files_of_keys(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may\nalice one\n\ntwo\n")
    assert read_keys(path) == ({"one": "alice", "two": "key-4"}, {})
    keys = Keys(read_keys(path)[0])
    assert keys.owner("Bearer one") == "alice" and keys.owner("Bearer two") == "key-4"
    for text in ("", "# none\n", "a b c\n"):
        path.write_text(text)
        with pytest.raises(SettingsError):
            read_keys(path)
    path.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="cannot read"):
        read_keys(path)


def test_turns_go_to_those_with_least_in_progress() -> None:
    @dataclass(eq=False)
    class Waits:
        owner: str
        texts: int = 1

    waiting = FairQueue(places=6)
    jobs = [Waits("many") for _ in range(5)] + [Waits("few"), Waits("other"), Waits("few")]
    for job in jobs:
        waiting.add(job)  # type: ignore[arg-type]
    taken = []
    while (job := waiting.pop()) is not None:  # type: ignore[assignment]
        taken.append(job.owner)
        waiting.begin(job)
    assert taken == ["many", "few", "other", "many", "few", "many", "many", "many"]
    assert len(waiting) == 0
    # Nobody takes all places, and who waits for memory holds up no other.
    for owner in ("many", "many", "few", "other"):
        waiting.add(Waits(owner))  # type: ignore[arg-type]
    assert [waiting.pop({"other"}).owner for _ in range(2)] == ["few", "many"]  # type: ignore[union-attr]
    waiting.begin(jobs[0])
    assert waiting.pop({"other"}) is None and waiting.pop().owner == "other"  # type: ignore[union-attr]
    waiting.end(jobs[0])
    assert waiting.pop().owner == "many"  # type: ignore[union-attr]


def test_who_floods_the_queue_does_not_hold_up_others(lm: LLM) -> None:
    with serving(lm, keys={"a": "a", "b": "b"}, max_running=2) as (server, url):
        ended: list[str] = []

        def ask(key: str) -> None:
            # Texts of one key would copy each other, and the late one nobody.
            assert post(url, key=key, max_tokens=150, ignore_eos=True, decodery={"drafter": "none"}).status_code == 200
            ended.append(key)

        threads = [threading.Thread(target=ask, args=("a",)) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.front.service.load.waiting >= 6)
        late = threading.Thread(target=ask, args=("b",))
        late.start()
        for thread in (*threads, late):
            thread.join(SECONDS)
        assert ended.count("a") == 12 and ended.index("b") <= 7, ended


def test_time_runs_out_for_a_search_and_leaves_what_is_settled(lm: LLM) -> None:
    spec = "step-beam:scorer=log-probability,n=1,m=1,delimiter=none,step_tokens=4"
    with serving(lm, seconds=0.3) as (_, url):
        found = post(url, max_tokens=LONG, ignore_eos=True, decodery={"search": spec}).json()
    choice, written = found["choices"][0], found["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "cancelled" and 0 < written < LONG
    whole = lm.search("x", spec, apply_chat_template=False, max_new_tokens=64, ignore_eos=True)[0].text
    assert choice["text"][:50] == whole[: min(50, len(choice["text"]))]


def test_time_runs_out_for_one_text_alone(lm: LLM) -> None:
    with serving(lm, seconds=0.3) as (server, url):
        found = post(url, max_tokens=LONG, ignore_eos=True).json()
        assert found["choices"][0]["finish_reason"] == "cancelled"
        written = found["usage"]["completion_tokens"]
        assert 0 < written < LONG
        expected = lm.generate("x", apply_chat_template=False, max_new_tokens=written, ignore_eos=True)
        assert expected.text.startswith(found["choices"][0]["text"].removesuffix("\ufffd"))  # type: ignore[union-attr]
        assert post(url).status_code == 200
        wait_until(lambda: server.front.service.idle)


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_ends_its_texts(lm: LLM, n: int) -> None:
    with serving(lm) as (server, url):
        with streaming(url, n=n, temperature=1.0) as events:
            for _ in range(3):
                next(events)
            passes = server.front.service.load.passes
        wait_until(lambda: server.front.service.idle)
        assert server.front.service.load.passes < passes + LONG / 2
        assert f'reason="cancelled"}} {n}.0' in httpx.get(f"{url}/metrics").text
        left_nothing(server)
        assert (
            post(url).json()["choices"][0]["text"] == lm.generate("x", apply_chat_template=False, max_new_tokens=4).text
        )  # type: ignore[union-attr]


@pytest.mark.parametrize("read", [0, 3], ids=["whole", "stream"])
def test_a_connection_that_closes_ends_its_text(lm: LLM, read: int) -> None:
    with serving(lm) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "x", "max_tokens": LONG, "stream": bool(read), "ignore_eos": True}).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: server.front.service.load.running == 1)
            if read:
                connection.recv(200)
        wait_until(lambda: server.front.service.idle)
        assert 'reason="cancelled"} 1.0' in httpx.get(f"{url}/metrics").text
        left_nothing(server)


def test_a_reader_that_does_not_read_holds_up_nobody(lm: LLM) -> None:
    with serving(lm) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        asked = {"prompt": "x", "max_tokens": LONG, "stream": True, "logprobs": 20}
        asked |= {"ignore_eos": True, "decodery": {"trace": "steps"}}
        body = json.dumps(asked).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        with connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: server.front.service.load.running == 1)
            for _ in range(5):
                assert post(url).status_code == 200
            # The text is written to its end, though nobody has read it.
            wait_until(lambda: server.front.service.idle)
            (told,) = (line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(WRITTEN))
            assert float(told.split()[-1]) == LONG + 5 * 4


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST /v1/completions HTTP/1.1\r\nHost: local", b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /"],
)
def test_a_connection_without_a_request_is_closed(lm: LLM, begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedProtocol, "header_seconds", 0.2)
    with serving(lm) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            connection.sendall(begun)
            while connection.recv(4096):
                pass
        # A text takes longer than headers may.
        assert post(url, max_tokens=300, ignore_eos=True).status_code == 200
    assert not server.server_state.connections


def test_what_is_nested_too_deep_is_said_to_be(lm: LLM) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    function = {"type": "function", "function": {"name": "f", "parameters": deep}}
    schema = {"type": "json_schema", "json_schema": {"schema": deep}}
    with serving(lm) as (_, url):
        for body in ({"tools": [function]}, {"response_format": schema}):
            asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **body}
            found = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=SECONDS)
            assert found.status_code in (200, 400), found.text
        far = httpx.post(
            f"{url}/v1/completions",
            content='{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}",
            headers={"Content-Type": "application/json"},
            timeout=SECONDS,
        )
        assert far.status_code == 400 and far.json()["error"]["message"] == "the request is nested too deep"


def test_a_search_counts_as_the_texts_that_it_follows(lm: LLM) -> None:
    wide = {"search": "best-of-n:n=129,scorer=log-probability"}
    with serving(lm, keys={"a": "a", "b": "b"}, max_texts_per_key=100, rows=16) as (server, url):
        service = server.front.service
        found = post(url, key="a", temperature=1.0, decodery=wide)
        assert found.status_code == 400 and found.json()["error"]["param"] == "decodery.search"
        message = "the search of this request follows 129 texts at a time, and one request may have 128: give it fewer"
        assert found.json()["error"]["message"] == message
        long = {"max_tokens": 400, "temperature": 1.0}
        search = {"search": "best-of-n:n=64,scorer=log-probability"}
        asked = {"key": "a", **long, "ignore_eos": True, "decodery": search}
        threads = [threading.Thread(target=post, args=(url,), kwargs=asked)]
        threads[0].start()
        wait_until(lambda: service.load.rows_read > 100)
        # 64 of the key's 100 texts are in progress; another key has all of its own.
        full = post(url, key="a", temperature=1.0, decodery=search)
        assert full.status_code == 429 and "this key has 64 texts in progress; it may have 100" in full.text
        passes = service.load.passes
        assert post(url, key="b", max_tokens=4).status_code == 200
        # Of the 1,600 passes of the search more go by while the request is on its way, the faster the machine.
        assert service.load.passes - passes <= 100
        wait_until(lambda: service.load.running == 1)
    threads[0].join(SECONDS)
    assert not threads[0].is_alive()


def test_a_text_larger_than_all_memory_is_refused_and_others_go_on() -> None:
    lm = tiny_lm()
    slot = lm.model.new_cache().slot_bytes
    with serving(lm, kv_bytes=300 * slot) as (_, url):
        refused = post(url, prompt="y" * 600)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "out_of_memory"
        assert post(url).status_code == 200


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The command in a process of its own, on the embedded model, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "decodery", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "is served at http://" in line, line + process.stderr.read()
    return process, line.split()[-1].removesuffix("/v1")


def test_the_command_drains_when_it_is_terminated() -> None:
    process, url = start("--max-queue", "4", "--kv-gib", "0.5")
    try:
        asked: dict[str, Any] = {"model": "smollm2", "messages": user("Tell a long story."), "stream": True}
        stream = client(url).chat.completions.create(**asked, max_tokens=60)
        next(stream)
        with httpx.Client(base_url=url, timeout=SECONDS) as kept:
            assert kept.get("/health").json() == {"status": "ok"}
            process.send_signal(signal.SIGTERM)

            def draining() -> bool:
                return kept.get("/decodery/load").json()["draining"] is True

            wait_until(draining)
            assert kept.get("/ready").status_code == 503
            late = kept.post("/v1/completions", json={"prompt": "x"})
            assert late.status_code == 503 and late.json()["error"]["code"] == "stopping"
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_command_says_what_is_wrong(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from decodery.cli.main import main

    empty = tmp_path / "keys"
    empty.write_text("")
    with pytest.raises(SystemExit) as left:
        main(["serve", "--api-key-file", str(empty)])
    assert left.value.code == 1
    for option, given, said in (
        ("--kv-gib", "-1", "above 0"),
        ("--kv-gib", "1e9", "--kv-gib asks for 1e+09 GiB of memory, and "),
        ("--memory-gib", "1e9", "--memory-gib asks for 1e+09 GiB of memory, and "),
    ):
        # No such model is looked for.
        with pytest.raises(SystemExit) as left:
            main(["serve", "-m", "nowhere", option, given, "--extra-model", "a=nowhere"])
        assert left.value.code == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_port_in_use_is_found_before_a_model_is_loaded(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    from decodery.cli.main import main

    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.create_server((host if host == "::1" else "127.0.0.1", 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as left:
            # There is no such model, which is found out later.
            main(["serve", "--host", host, "--port", str(port), "--model", "/no/such/model"])
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said == f"decodery: cannot listen at {host}, port {port} (Address already in use): choose another one " + (
        "with --port or --host\n"
    )
