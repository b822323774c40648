"""Several models at one address: loaded on demand, unloaded when idle, within one memory limit."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import httpx
import openai
import pytest

from decodery.core.errors import CorruptFile
from decodery.llm.llm import LLM
from decodery.models.loaders.source import weight_bytes
from decodery.server.served import ModelSource
from serving import SECONDS, client, serving, tiny_lm, user, wait_until

MIB = 1 << 20


class Shelf:
    """Models that can be loaded, and what was loaded."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.alive = WeakSet[LLM]()
        self.gate = threading.Event()
        self.gate.set()

    def source(self, name: str, size: int = MIB, seed: int = 0) -> ModelSource:
        return ModelSource(name, lambda: size, partial(self._load, name, seed))

    def _load(self, name: str, seed: int) -> LLM:
        assert self.gate.wait(SECONDS)
        self.loads.append(name)
        if name == "broken":
            raise CorruptFile("broken.gguf ends too early")
        found = other(seed)
        self.alive.add(found)
        return found


def other(seed: int) -> LLM:
    return tiny_lm(seed=seed)


def ask(url: str, model: str | None, **more: Any) -> str:
    asked: dict[str, Any] = {"messages": user("tides"), "max_tokens": 12, **more}
    return client(url).chat.completions.create(model=model or "tiny", **asked).choices[0].message.content or ""


def engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


def states(url: str) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in httpx.get(f"{url}/v1/models").json()["data"]}


def test_models_are_loaded_when_a_request_names_them_and_unloaded_when_idle() -> None:
    shelf, others = Shelf(), set(engines())
    with serving(tiny_lm(), more=[shelf.source("a", seed=7)], idle_seconds=0.2) as (server, url):
        assert states(url) == {"tiny": "loaded", "a": "unloaded"} and shelf.loads == []
        texts = [ask(url, name) for name in ("tiny", "a")]
        assert texts == [each.chat(user("tides"), max_new_tokens=12).text for each in (tiny_lm(), other(7))]
        assert texts[0] != texts[1] and shelf.loads == ["a"]
        wait_until(lambda: states(url) == {"tiny": "loaded", "a": "unloaded"})
        wait_until(lambda: len([each for each in engines() if each not in others]) == 1)
        gc.collect()
        assert not shelf.alive
        assert ask(url, "a") == texts[1] and shelf.loads == ["a", "a"]
        written = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if "generation_tokens_total{" in line]
        # What was counted before a model was unloaded goes on; each metric has one heading.
        assert [line.split()[-1] for line in written] == ["12.0", "24.0"]
        assert httpx.get(f"{url}/metrics").text.count("# TYPE decodery_generation_tokens_total") == 1
        assert [each["model"] for each in httpx.get(f"{url}/api/tags").json()["models"]] == ["tiny", "a"]
        with pytest.raises(openai.NotFoundError, match="use 'tiny', 'a'"):
            ask(url, "b")
        assert server.front.models.first.service.alive


def test_a_slow_load_blocks_nobody_and_is_shared() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    with (
        serving(tiny_lm(), more=[shelf.source("a", seed=7), shelf.source("b")]) as (_, url),
        ThreadPoolExecutor(3) as pool,
    ):
        waiting = [pool.submit(ask, url, "a", seed=number) for number in (0, 0)]
        wait_until(lambda: states(url)["a"] == "loading")
        assert ask(url, None) and httpx.get(f"{url}/ready").status_code == 200
        # A client that leaves ends no load that others wait for.
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"model": "a", "prompt": "x"}, timeout=0.1)
        assert not any(each.done() for each in waiting)
        shelf.gate.set()
        assert len({each.result(SECONDS) for each in waiting}) == 1 and shelf.loads == ["a"]


def test_one_limit_holds_for_all_that_are_loaded() -> None:
    shelf, kv = Shelf(), 8 * MIB
    sources = [shelf.source(name, 10 * MIB, seed) for seed, name in enumerate("abc")]
    big = shelf.source("big", 100 * MIB)
    limits = {"kv_bytes": kv, "memory_bytes": 2 * (10 * MIB + kv) + 10 * MIB + kv}
    with serving(tiny_lm(), more=[*sources, big], size=10 * MIB, **limits) as (_, url):
        for name in "ab":
            ask(url, name)
        ask(url, "a")
        ask(url, "c")
        # The one used longest ago has left.
        assert states(url) == {"tiny": "loaded", "a": "loaded", "b": "unloaded", "c": "loaded", "big": "unloaded"}
        with pytest.raises(openai.InternalServerError, match=r"takes 0\.1 GiB.*--memory-gib"):
            client(url).chat.completions.create(model="big", messages=user("x"), max_tokens=2)
        assert "big" not in shelf.loads
        long = {"max_tokens": 1900, "ignore_eos": True, "stream": True, "prompt": "x", "decodery": {"drafter": "none"}}
        streams = [
            httpx.stream("POST", f"{url}/v1/completions", json={**long, "model": name}, timeout=SECONDS)
            for name in "ac"
        ]
        with streams[0], streams[1]:
            refused = httpx.post(f"{url}/v1/completions", json={"model": "b", "prompt": "x"}, timeout=SECONDS)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "models_in_use"
        wait_until(lambda: httpx.get(f"{url}/decodery/load").json()["running"] == 0)
        assert ask(url, "b")


def test_a_model_that_cannot_be_loaded_is_said_to_be_so_each_time() -> None:
    shelf = Shelf()
    with serving(tiny_lm(), more=[shelf.source("broken")]) as (_, url):
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/completions", json={"model": "broken", "prompt": "x"}, timeout=SECONDS)
            error = answer.json()["error"]
            assert answer.status_code == 503 and error["code"] == "model_not_loaded"
            assert "broken.gguf ends too early" in error["message"]
        assert shelf.loads == ["broken"] * 2 and ask(url, None)


def test_an_engine_that_fails_takes_only_its_model_along() -> None:
    shelf = Shelf()
    with serving(tiny_lm(), more=[shelf.source("a", seed=7)]) as (server, url):
        expected = ask(url, "a")
        (engine,) = [each._engine for each in (model.service for model in server.front.models.loaded[1:])]
        engine.step = lambda: 1 / 0
        with pytest.raises(openai.InternalServerError):
            ask(url, "a")
        wait_until(lambda: states(url)["a"] == "unloaded")
        assert ask(url, "a") == expected and shelf.loads == ["a", "a"] and ask(url, None)


def test_the_size_of_a_model_is_that_of_its_weights(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(b"GGUF" * 100 * number)
    assert weight_bytes(str(tmp_path / "m-00001-of-00002.gguf")) == 1200
