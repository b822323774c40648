"""A server under mixed traffic and faults for a long time: no error of its own, no text different, memory flat.

    python benchmarks/serve_soak.py [--seconds 3600]

Known requests, searches, constraints, monitors, an adapter and cache policies among them, are answered alone first.
Then clients send them mixed, whole and streamed, beside clients that leave, send what is no request, prompts that are
too long, schemas nothing fits, and clients that read slowly or not at all.
What comes of it is in benchmarks/results/serve-soak.json: answers by kind and status, texts that differ from their solo
run, and the server's resident memory over time. The status is 1 where the server failed at any of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

import decodery
from decodery.bench.load.target import own
from decodery.bench.terminal import progress_bar
from decodery.cli.decode import stop_on_interrupt
from decodery.models.loaders.adapters import Adapter, Thin
from decodery_benchmarks.results import write_result

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KV_GIB = "0.25"
"""Little, so that memory runs out often: texts wait for it, and what was kept for later ones goes."""
PATIENCE = 240.0
"""Seconds after which an answer counts as one that never comes."""
WARM_UP = 0.25
"""Share of the time in which memory may grow: the prefix cache fills, and pools reach their size."""
FLAT = 0.03
"""Share of the memory by which the last quarter may lie above the one after the warm-up."""
POINTS = 240

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
    """counts: answers by what was sent and how it was answered; faults: what must not be, the first of each kind."""

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
        answer = await self.http.post(known.url, json=known.body)
        self.note(kind, answer.status_code, answer.text)
        if answer.status_code == 200:
            self.compare(known, texts_of(answer.json()))

    async def stream(self, kind: str = "stream", pause: float = 0.0, most: int | None = None) -> None:
        """pause: seconds before every read; most: reads after which the client leaves."""
        known = self.chance.choice(self.known)
        texts = [""] * known.body.get("n", 1)
        async with self.http.stream("POST", known.url, json={**known.body, "stream": True}) as answer:
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


def resident(process: subprocess.Popen[bytes]) -> float:
    """MiB of memory a process holds."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def soak(
    url: str,
    process: subprocess.Popen[bytes],
    options: argparse.Namespace,
    report: Callable[[str, int, int], None],
    stopped: Callable[[], bool],
    adapter: Path,
) -> Soak:
    chance = random.Random(options.seed)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as http:
        found = Soak(http, [], chance)
        asked = known_requests(options.seed, options.topics, adapter)
        for number, known in enumerate(asked):
            report("alone", number, len(asked))
            answer = (await http.post(known.url, json=known.body)).raise_for_status().json()
            found.known.append(replace(known, texts=texts_of(answer)))
            if stopped():
                return found
        begin = time.monotonic()

        def over() -> bool:
            return stopped() or process.poll() is not None or time.monotonic() - begin > options.seconds

        clients = [asyncio.create_task(found.client(over)) for _ in range(options.clients)]
        while not over():
            now = time.monotonic() - begin
            found.memory.append((round(now, 1), round(resident(process), 1)))
            report(f"{found.compared} texts compared", int(now), int(options.seconds))
            await asyncio.sleep(max(0.5, options.seconds / POINTS))
        await asyncio.gather(*clients)
        if process.poll() is not None:
            found.fault("the server ended", f"with status {process.returncode}")
            return found
        for _ in range(100):
            found.load = (await http.get("/decodery/load")).json()
            if not found.load["running"] and not found.load["waiting"]:
                break
            await asyncio.sleep(0.1)
        else:
            found.fault("texts that nobody waits for", json.dumps(found.load))
        health = await http.get("/health")
        if health.status_code != 200:
            found.fault("health", health.text)
        return found


def growth(memory: list[tuple[float, float]]) -> dict[str, float] | None:
    """Memory after the warm-up: its median in the quarter that follows and in the last one, and MiB per hour."""
    if len(memory) < 16:
        return None
    times, held = np.array(memory).T
    quarter = len(held) // 4
    warm = int(WARM_UP * len(held))
    slope = np.polyfit(times[warm:] / 3600, held[warm:], 1)[0]
    early, late = float(np.median(held[warm : warm + quarter])), float(np.median(held[-quarter:]))
    return {
        "after_warm_up_mib": early,
        "last_quarter_mib": late,
        "grown_share": round(late / early - 1, 4),
        "mib_per_hour": round(float(slope), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--topics", type=int, default=8, help="of the requests whose texts are known, 16 each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "serve-soak.json")
    options = parser.parse_args()
    server = own(options.model, "auto")
    wide = ("--max-queue", "1024", "--max-texts-per-key", "1024", "--trust")
    server = replace(server, command=(*server.command, "--kv-gib", KV_GIB, *wide))
    with (
        tempfile.TemporaryDirectory() as folder,
        stop_on_interrupt() as stopped,
        progress_bar() as report,
        server.process(stopped) as (process, url),
    ):
        adapter = Path(folder) / "adapter.safetensors"
        drawn_adapter(options.model, adapter)
        found = asyncio.run(soak(url, process, options, report, stopped, adapter))
        complete = not stopped()
    if process.returncode:
        found.fault("status of the server", str(process.returncode))
    grown = growth(found.memory)
    flat = grown is None or grown["grown_share"] <= FLAT
    result = {
        "command": f"python benchmarks/serve_soak.py --seconds {options.seconds:g} --clients {options.clients} "
        f"--topics {options.topics}",
        "complete": complete,
        "seconds": options.seconds,
        "server_errors": found.server_errors,
        "texts_compared": found.compared,
        "texts_different": found.different,
        "never_answered": found.never,
        "memory_flat": flat,
        "memory": grown,
        "answers": dict(sorted(found.counts.items())),
        "load_at_the_end": found.load,
        "faults": found.faults,
        "resident_mib_by_second": found.memory,
    }
    summary = [name for name in result if name not in ("command", "complete", "seconds")]
    write_result(options.json, result, summary=summary)
    print(json.dumps({name: value for name, value in result.items() if name != "resident_mib_by_second"}, indent=1))
    sys.exit(0 if not found.faults and flat else 1)


if __name__ == "__main__":
    main()
