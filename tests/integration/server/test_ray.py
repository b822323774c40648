"""Replicas at one address: who goes where, and a cluster of two on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

import decodery as dc
from decodery.server.affinity import beginning, ranked
from serving import SECONDS, client, user, wait_until

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'decodery[ray]'")


def chat(*said: str, system: str = "Be short.") -> bytes:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return json.dumps({"messages": [{"role": "system", "content": system}, *turns]}).encode()


def test_a_conversation_keeps_its_name() -> None:
    first = beginning({}, chat("Hello."))
    assert first and first == beginning({}, chat("Hello.", "Hi.", "And now?"))
    assert first != beginning({}, chat("Good day."))
    assert first != beginning({}, chat("Hello.", system="Be long."))
    assert first != beginning({"authorization": "Bearer x"}, chat("Hello."))


def test_prompts_that_begin_alike_have_one_name() -> None:
    def name(prompt: Any) -> str:
        return beginning({}, json.dumps({"prompt": prompt}).encode())

    long = "word " * 100
    assert name(long + "a") == name(long + "b") == name([long + "c", "other"]) != name("a" + long)
    assert name(list(range(500))) == name([*range(499), 7]) != name(list(range(1, 500)))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 9999, b"1"])
def test_what_is_no_request_has_no_name(body: bytes) -> None:
    assert beginning({}, body) == ""


@pytest.mark.parametrize("body", [b"{}", b'{"messages": [1]}', b'{"messages": "x"}', b'{"prompt": {"a": []}}'])
def test_requests_without_a_prompt_go_somewhere(body: bytes) -> None:
    beginning({}, body)


def test_names_stay_where_they_are_when_replicas_come_and_go() -> None:
    names = [str(number) for number in range(600)]
    three, four = dict.fromkeys("abc", 0), dict.fromkeys("abcd", 0)
    before, after = ({name: ranked(name, found)[0] for name in names} for found in (three, four))
    assert all(count > 120 for count in Counter(before.values()).values())
    moved = [name for name in names if before[name] != after[name]]
    assert 90 < len(moved) < 220 and {after[name] for name in moved} == {"d"}
    # What most would write first, a hash modulo the number, moves nearly all.
    assert sum(hash(name) % 3 != hash(name) % 4 for name in names) > 400


def test_busy_replicas_come_last() -> None:
    for name in map(str, range(50)):
        assert ranked(name, {"a": 9, "b": 0, "c": 0})[-1] == "a"
        assert ranked(name, {"a": 8, "b": 0}) == ranked(name, {"a": 0, "b": 0})
    assert ranked("x", {}) == []


@pytest.fixture(scope="module")
def server(fleet: tuple[str, int]) -> int:
    return fleet[1]


@pytest.fixture(scope="module")
def url(fleet: tuple[str, int]) -> str:
    return fleet[0]


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[str, int]]:
    """The command with two replicas of the embedded model: its address and its process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    limits = ["--kv-gib", "0.25", "--max-running", "16"]
    process = subprocess.Popen(
        [sys.executable, "-m", "decodery", "serve", "--ray", "--replicas", "2", "--port", str(port), *limits],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "is served at" in line:
                break
        else:
            raise AssertionError(f"no server, status {process.wait()}")
        yield line.split()[-1].removesuffix("/v1"), process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


@needs_ray
def test_replicas_answer_as_one_server(url: str) -> None:
    lm = dc.load("smollm2")
    api = client(url)
    for number in range(6):
        said = f"Name {number + 2} colours."
        wanted = lm.generate(said, max_new_tokens=12, temperature=0.8, seed=number).text
        asked: dict[str, Any] = {"model": "smollm2", "messages": user(said), "max_tokens": 12}
        asked |= {"temperature": 0.8, "seed": number}
        assert api.chat.completions.create(**asked).choices[0].message.content == wanted
        pieces = [chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(**asked, stream=True)]
        assert "".join(pieces) == wanted and len(pieces) > 2
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    wrong = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "temperature": -1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"
    assert httpx.get(f"{url}/v1/nothing").status_code == 404


def ids(url: str) -> set[str]:
    """What replicas of this address call themselves."""
    return {httpx.get(f"{url}/decodery/load").headers["x-replica"] for _ in range(40)}


@needs_ray
def test_conversations_stay_with_what_was_read_of_them(url: str) -> None:
    api = client(url)
    homes = Counter[str]()
    for number in range(12):
        turns = user(f"Tell me {number} things about the sea, the wind and the rain, one after the other, in a list.")
        found: list[str] = []
        for turn in range(3):
            raw = api.chat.completions.with_raw_response.create(model="smollm2", messages=turns, max_tokens=8)
            answer = raw.parse()
            found.append(raw.headers["x-replica"])
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > (40 if turn else -1)
            turns = [*turns, {"role": "assistant", "content": answer.choices[0].message.content}, *user("Go on.")]
        assert len(set(found)) == 1
        homes[found[0]] += 1
    # Routing that knows nothing of conversations would have parted nearly all of them; routing to one replica, none.
    assert len(homes) == 2 and set(homes) == ids(url)


@needs_ray
def test_clients_that_leave_end_their_texts(url: str) -> None:
    body = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as stream:
        next(stream.iter_lines())

    def idle() -> bool:
        loads = [httpx.get(f"{url}/decodery/load").json()["running"] for _ in range(12)]
        return not any(loads)

    wait_until(idle)


def replica_processes(server: int) -> list[int]:
    """Those of a server's replicas, which its own Ray has started."""
    parents, replicas = dict[int, int](), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"ServeReplica:default:replica" in (folder / "cmdline").read_bytes():
                replicas.append(int(folder.name))
        except OSError:
            continue

    def below(process: int) -> bool:
        while process and process != server:
            process = parents.get(process, 0)
        return process == server

    return [each for each in replicas if below(each)]


@needs_ray
def test_requests_of_a_lost_replica_are_answered_by_another(url: str, server: int) -> None:
    asked: list[dict[str, Any]] = [
        {"model": "smollm2", "prompt": f"{number} ships", "max_tokens": 60, "temperature": 0.9, "seed": number}
        for number in range(8)
    ]

    def whole(body: dict[str, Any]) -> str:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def streamed(body: dict[str, Any]) -> tuple[str, str]:
        text, last = "", ""
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=SECONDS) as stream:
            for line in filter(None, stream.iter_lines()):
                last = line.removeprefix("data: ")
                if last != "[DONE]" and "choices" in (found := json.loads(last)):
                    text += found["choices"][0]["text"]
        return text, last

    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(whole, asked))
        lost = replica_processes(server)[0]
        wholes, streams = [pool.submit(whole, body) for body in asked], [pool.submit(streamed, body) for body in asked]
        wait_until(lambda: httpx.get(f"{url}/decodery/load").json()["running"] > 0)
        os.kill(lost, signal.SIGKILL)
        assert [each.result(SECONDS) for each in wholes] == alone
        for found, expected in zip([each.result(SECONDS) for each in streams], alone, strict=True):
            text, last = found
            # A stream of which the client has something ends with an error event; no text has anything else in it.
            assert (text == expected and last == "[DONE]") or json.loads(last)["error"]["code"] == "replica_lost"
            assert expected.startswith(text)
    wait_until(lambda: len(replica_processes(server)) == 2 and len(ids(url)) == 2)
