"""The clients of a soak: known requests of every kind, and what else reaches a server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

import decodery
from decodery.models.loaders.adapters import Adapter, Thin

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATIENCE = 240.0
"""Seconds after which an answer counts as one that never comes."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {"type": "object"}
for _ in range(60):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}
IMPOSSIBLE: list[Any] = [
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"not": {}},
    {"$ref": "#/$defs/none"},
    {"$ref": "#"},
    {"enum": []},
    {"type": "string", "pattern": "(a+)+(?=b)\\1"},
    {"type": "array", "minItems": 100000, "items": {"type": "integer"}},
    {"type": "string", "x": "y" * 100_000},
    NESTED,
]
NO_REQUESTS: list[tuple[bytes, str]] = [
    (b"{", "application/json"),
    (b"", "application/json"),
    (b"[]", "application/json"),
    (b"\xff\xfe", "application/json"),
    (b"[" * 50_000, "application/json"),
    (b'{"messages": []}', "application/json"),
    (b'{"messages": [{"role": "nobody", "content": "x"}]}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 100000}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "decodery": {"drafter": "no-such"}}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "decodery": {"constraint": "monitor:project=/no/such/folder"}}',
     "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "gpt-4"}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "text/plain"),
]  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A request whose answer alone is known. texts: of its choices."""

    url: str
    body: dict[str, Any]
    texts: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """A search by its name, and all else as texts."""
        return str(self.body.get("decodery", {}).get("search", "text")).partition(":")[0]


def drawn_adapter(model: str, path: Path) -> None:
    """Write an adapter of drawn numbers that changes texts."""
    config = decodery.load(model).model.config
    draws = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(*shape, generator=draws) for shape in ((config.hidden_size, 2), (2, config.hidden_size))
    )
    Adapter({"layers.0.output": Thin(first / 16, second / 16)}).save(path)


def known_requests(seed: int, most: int, adapter: Path) -> list[Known]:
    """Requests of every kind that are answered in a few seconds, about so many topics."""
    topics = ("tides", "rain", "wind", "iron", "glass", "paper", "bread", "salt")[:most]
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"stop": ["\n", "."]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}},
        {"temperature": 0.9, "decodery": {"drafter": "prompt-lookup"}},
        {"temperature": 0.9, "decodery": {"drafter": "none"}},
        {"structured_outputs": {"regex": "[A-Z][a-z]{2,12} [0-9]{1,3}"}, "temperature": 0.9},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, "temperature": 1.0},
        {"temperature": 0.8, "decodery": {"search": "best-of-n:scorer=log-probability,n=3"}},
        {"temperature": 0.8, "decodery": {"search": "step-beam:scorer=log-probability,step_tokens=8,n=4,m=2"}},
        {"decodery": {"search": "beam:width=3"}},
        {"temperature": 0.7, "decodery": {"cache_policy": "streaming-llm"}},
        {"temperature": 0.7, "decodery": {"monitor": "confidence"}},
        {"temperature": 0.7, "decodery": {"logits_source": f"adapter:file={adapter}"}},
    ]
    found = []
    for number, topic in enumerate(topics):
        for place, more in enumerate(settings):
            body = {"max_tokens": 8 + 7 * ((number + place) % 8), "seed": seed + 100 * number + place, **more}
            said = f"Tell me something about {topic}."
            if place % 3 == 1:
                found.append(Known(TEXT, {"prompt": said, **body}))
            else:
                found.append(Known(CHAT, {"messages": [{"role": "user", "content": said}], **body}))
    return found


@dataclass
class Soak:
    """Clients, and what came of what they sent.

    counts: answers by what was sent and how it was answered. faults: what must not be, the first of each kind. seconds:
    by kind, of requests that were waited for, those that were given up included.
    """

    http: httpx.AsyncClient
    known: list[Known]
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    different: int = 0
    server_errors: int = 0
    never: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, kind: str, known: Known) -> Iterator[None]:
        """Note what an answer takes of which nothing is read late or left."""
        begin = time.monotonic()
        try:
            yield
        finally:
            if kind in ("whole", "stream"):
                self.seconds.setdefault(known.kind, []).append(time.monotonic() - begin)

    def waits(self) -> dict[str, dict[str, float]]:
        """By kind: how many, and the median, the 95th percentile and the most of their seconds."""
        return {
            kind: {"requests": len(each)}
            | {name: round(float(np.percentile(each, q)), 1) for name, q in (("p50", 50), ("p95", 95), ("most", 100))}
            for kind, each in sorted(self.seconds.items())
        }

    def note(self, kind: str, status: int, said: str) -> None:
        """An answer came. A request of ours that is refused is a fault as much as an error of the server."""
        self.counts[f"{kind}: {status}"] += 1
        wrong = {"whole", "stream", "slow", "long"} if status != 200 else {"no request", "too long"}
        if status >= 500:
            self.server_errors += 1
            self.fault(f"{kind} {status}", said)
        elif kind in wrong:
            self.fault(f"{kind} {status}", said)

    def fault(self, what: str, said: str) -> None:
        self.faults.setdefault(what, said[:400])

    def compare(self, known: Known, texts: tuple[str, ...]) -> None:
        self.compared += 1
        if texts != known.texts:
            self.different += 1
            self.fault("different text", f"{json.dumps(known.body)}: {texts} and alone {known.texts}")

    async def whole(self, kind: str = "whole") -> None:
        known = self.chance.choice(self.known)
        with self.timed(kind, known):
            answer = await self.http.post(known.url, json=known.body)
        self.note(kind, answer.status_code, answer.text)
        if answer.status_code == 200:
            self.compare(known, texts_of(answer.json()))

    async def stream(self, kind: str = "stream", pause: float = 0.0, most: int | None = None) -> None:
        """pause: seconds before every read; most: reads after which the client leaves."""
        known = self.chance.choice(self.known)
        texts = [""] * known.body.get("n", 1)
        body = {**known.body, "stream": True}
        with self.timed(kind, known):
            async with self.http.stream("POST", known.url, json=body) as answer:
                if answer.status_code != 200:
                    self.note(kind, answer.status_code, (await answer.aread()).decode(errors="replace"))
                    return
                over, reads = False, 0
                async for line in answer.aiter_lines():
                    await asyncio.sleep(pause)
                    reads += 1
                    if most is not None and reads > most:
                        break
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        over = True
                    elif data:
                        found = json.loads(data)
                        if "error" in found:
                            self.note(kind, 500, data)
                            return
                        for choice in found["choices"]:
                            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if most is not None:
            self.counts[f"{kind}: left"] += 1
            return
        self.note(kind, 200, "")
        if not over:
            self.fault("cut stream", json.dumps(known.body))
        self.compare(known, tuple(texts))

    async def leaves_stream(self) -> None:
        await self.stream("leaves a stream", most=self.chance.randrange(12))

    async def leaves(self) -> None:
        try:
            async with asyncio.timeout(self.chance.random()):
                await self.whole("leaves")
        except TimeoutError:
            self.counts["leaves: left"] += 1

    async def slow(self) -> None:
        await self.stream("slow", pause=self.chance.uniform(0.05, 0.5))

    async def deaf(self) -> None:
        """Asks for a long stream and never reads it."""
        host, port = self.http.base_url.host, self.http.base_url.port
        body = json.dumps({"prompt": "Once", "max_tokens": 300, "stream": True, "ignore_eos": True})
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(host, port)
        try:
            writer.write((head + body).encode())
            await writer.drain()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(self.chance.uniform(1, 5))
        finally:
            writer.transport.abort()
        self.counts["deaf: left"] += 1

    async def no_request(self) -> None:
        data, kind = self.chance.choice(NO_REQUESTS)
        answer = await self.http.post(CHAT, content=data, headers={"content-type": kind})
        self.note("no request", answer.status_code, f"{data[:200]!r}: {answer.text}")

    async def too_long(self) -> None:
        size = self.chance.choice((60_000, 1_000_000, 6_000_000))
        answer = await self.http.post(TEXT, json={"prompt": "word " * (size // 5), "max_tokens": 5})
        self.note("too long", answer.status_code, f"{size} characters: {answer.text}")

    async def long(self) -> None:
        """A prompt of thousands of tokens, each time another one."""
        words = " ".join(str(self.chance.randrange(1000)) for _ in range(self.chance.randrange(200, 800)))
        answer = await self.http.post(TEXT, json={"prompt": words, "max_tokens": 4})
        self.note("long", answer.status_code, answer.text)

    async def impossible(self) -> None:
        schema = self.chance.choice(IMPOSSIBLE)
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8, "response_format": wanted}
        answer = await self.http.post(CHAT, json=body)
        self.note("impossible schema", answer.status_code, f"{str(schema)[:200]}: {answer.text}")

    async def client(self, until: Callable[[], bool]) -> None:
        """One thing after the other."""
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.whole, 30),
            (self.stream, 25),
            (self.leaves_stream, 10),
            (self.leaves, 6),
            (self.no_request, 8),
            (self.impossible, 6),
            (self.slow, 6),
            (self.long, 4),
            (self.too_long, 3),
            (self.deaf, 2),
        ]
        actions, weights = [each for each, _ in kinds], [weight for _, weight in kinds]
        while not until():
            action = self.chance.choices(actions, weights)[0]
            try:
                async with asyncio.timeout(PATIENCE):
                    await action()
            except TimeoutError:
                self.never += 1
                self.fault("no answer", action.__name__)
            except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                self.counts[f"{action.__name__}: {type(error).__name__}"] += 1
                self.fault(f"{action.__name__} {type(error).__name__}", str(error))


def texts_of(answer: dict[str, Any]) -> tuple[str, ...]:
    return tuple(each.get("text") or (each.get("message") or {}).get("content") or "" for each in answer["choices"])
