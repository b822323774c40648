"""Texts under load: whatever arrives, leaves, is preempted or begins alike, every text is what it is alone."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import numpy as np
import pytest

import decodery as dc
from covering import DEEP
from decodery.llm.llm import LLM
from decodery.server.service import Service
from decodery.step.sequence import Sequence
from serving import SECONDS, serving, tiny_lm, wait_until

TRACES = 200 if DEEP else 2
ABORTS = 1000 if DEEP else 15
DRAFTERS = ["auto", "none", "prompt-lookup:length=4", "suffix-automaton", "token-recycling:nodes=8"]
BEGINNINGS = ["the tide comes and the tide goes ", "def tide(moon, sun): ", "a" * 100, ""]


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm(max_positions=512)


def audit(service: Service) -> None:
    """Every page is held by exactly the texts that say so, and what is free is nobody's."""
    schedule = service._engine._schedule
    tasks = [run.task for run in (*schedule.runs, *schedule._waiting)] + [job.task for job in service._active]
    texts = {id(task): task for task in tasks if isinstance(task, Sequence)}
    caches = [each.cache for each in service._prefixes._entries] + [text.cache for text in texts.values()]
    counted: dict[int, Any] = {}
    for cache in caches:
        pool = cache.pages.pool
        counted.setdefault(pool, np.zeros(pool.most, dtype=np.int32))[cache.pages.held] += 1
    for pool, held in counted.items():
        assert (held[held > 0] == pool.holders[held > 0]).all()


def audited(service: Service) -> None:
    """Let the engine's thread look after every pass; what it finds wrong ends the engine."""
    step = service._engine.step

    def looked_at() -> Any:
        advanced = step()
        audit(service)
        return advanced

    service._engine.step = looked_at  # type: ignore[method-assign]


class Traffic:
    """Requests of one trace, by chance, and what came of them."""

    def __init__(self, lm: LLM, url: str, chance: random.Random) -> None:
        self.lm, self.url, self.chance = lm, url, chance

    def request(self, number: int) -> dict[str, Any]:
        chance = self.chance
        prompt = chance.choice(BEGINNINGS) + chance.choice("abcdef") * chance.randint(1, 60)
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": chance.randint(1, 60), "seed": number}
        asked |= {
            "temperature": chance.choice([0, 1.0]),
            "n": chance.choice([1, 1, 2]),
            "stream": chance.random() < 0.6,
        }
        return asked | {"decodery": {"drafter": chance.choice(DRAFTERS)}}

    def alone(self, asked: dict[str, Any], index: int) -> str:
        settings = {"max_new_tokens": asked["max_tokens"], "temperature": float(asked["temperature"])}
        output = self.lm.generate(
            asked["prompt"], apply_chat_template=False, seed=asked["seed"] + index, drafter=None, **settings
        )
        return output.text  # type: ignore[union-attr]

    async def send(self, http: httpx.AsyncClient, number: int) -> None:
        """Send one request, maybe leave before its end, and compare what came with what it would be alone."""
        asked, cut = self.request(number), self.chance.random() < 0.3
        await asyncio.sleep(self.chance.random() * 0.2)
        if asked["stream"]:
            texts, ended = await self._stream(http, asked, self.chance.randint(1, 12) if cut else None)
        else:
            call = http.post("/v1/completions", json=asked)
            try:
                answer = await asyncio.wait_for(call, self.chance.random() * 0.1 if cut else SECONDS)
            except TimeoutError:
                assert cut
                return
            assert answer.status_code == 200, answer.text
            texts, ended = {each["index"]: each["text"] for each in answer.json()["choices"]}, True
        for index, text in texts.items():
            expected = self.alone(asked, index)
            assert text == expected if ended else expected.startswith(text), asked

    async def _stream(
        self, http: httpx.AsyncClient, asked: dict[str, Any], most: int | None
    ) -> tuple[dict[int, str], bool]:
        texts: dict[int, str] = {}
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            count = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return texts, True
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    choice = chunk["choices"][0]
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    count += 1
                if count == most:
                    break
        return texts, False

    async def run(self, requests: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=SECONDS) as http:
            await asyncio.gather(*(self.send(http, number) for number in range(requests)))


@pytest.mark.parametrize("seed", range(TRACES))
def test_every_text_of_a_random_trace_is_what_it_is_alone(lm: LLM, seed: int) -> None:
    chance = random.Random(seed)
    slot = lm.model.new_cache().slot_bytes
    limits: dict[str, Any] = {"max_running": chance.choice([2, 5, 12]), "rows": chance.choice([6, 40, 200])}
    limits |= {"chunk": chance.choice([5, 64]), "kv_bytes": slot * chance.choice([600, 1500, 20_000])}
    with serving(lm, **limits) as (server, url):
        service = server.front.service
        audited(service)
        asyncio.run(Traffic(lm, url, chance).run(14))
        wait_until(lambda: service.idle and not service._busy)
        assert service.failure is None
        if seed == 0:
            assert service.load.prefix_found > 0
        service._prefixes.clear()
        assert service._engine.held_bytes == 0


def test_texts_are_preempted_where_memory_is_short(lm: LLM) -> None:
    """The traces above do what they are for."""
    slot = lm.model.new_cache().slot_bytes
    with serving(lm, max_running=8, kv_bytes=600 * slot, rows=64) as (server, url):
        audited(server.front.service)
        bodies = [{"prompt": letter * 150, "max_tokens": 150, "ignore_eos": True} for letter in "abcd"]

        async def all_of_them() -> list[str]:
            async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
                answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
            return [answer.json()["choices"][0]["text"] for answer in answers]

        texts = asyncio.run(all_of_them())
        assert server.front.service.load.preemptions > 0
    expected = [
        lm.generate(letter * 150, apply_chat_template=False, max_new_tokens=150, ignore_eos=True) for letter in "abcd"
    ]
    assert texts == [output.text for output in expected]  # type: ignore[union-attr]


def test_a_text_can_be_left_at_any_point(lm: LLM) -> None:
    chance = random.Random(5)
    expected = lm.generate(
        "the tide", apply_chat_template=False, max_new_tokens=400, ignore_eos=True, temperature=1.0
    ).text  # type: ignore[union-attr]
    with serving(lm, max_running=6, chunk=3) as (server, url):
        service = server.front.service
        audited(service)

        async def leave(http: httpx.AsyncClient) -> None:
            asked = {"prompt": "the tide", "max_tokens": 400, "temperature": 1.0, "stream": True}
            asked |= {"n": chance.choice([1, 2]), "ignore_eos": True}
            text = ""
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                most = chance.randint(0, 30)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        break
                    if line and most > 0:
                        choice = json.loads(line.removeprefix("data: "))["choices"][0]
                        text += choice["text"] if choice["index"] == 0 else ""
                        most -= 1
                    elif most <= 0:
                        break
            assert expected.startswith(text)

        async def all_of_them() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
                for _ in range(ABORTS // 6):
                    await asyncio.gather(*(leave(http) for _ in range(6)))

        asyncio.run(all_of_them())
        wait_until(lambda: service.idle and not service._busy)
        assert service.failure is None
        service._prefixes.clear()
        assert service._engine.held_bytes == 0


def test_texts_of_the_embedded_model_are_its_own_beside_others() -> None:
    lm = dc.load("smollm2")
    prompts = [f"Name {number} things that are {colour}." for number in (2, 3) for colour in ("red", "blue", "green")]
    settings: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
    with serving(lm, chunk=16, rows=64) as (_, url):

        async def all_of_them() -> list[str]:
            async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
                bodies = [
                    {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "seed": seed, **settings}
                    for seed, prompt in enumerate(prompts)
                ]
                answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))
            return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

        texts = asyncio.run(all_of_them())
    for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = lm.generate(prompt, max_new_tokens=24, seed=seed, drafter=None, **settings)
        assert text == alone.text  # type: ignore[union-attr]
