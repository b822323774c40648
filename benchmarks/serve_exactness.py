"""Whether texts of the embedded model depend on who else is served: seeded requests at once, then each one alone.

    python benchmarks/serve_exactness.py [--requests 64] [--tokens 64] [--aborts 32]

A server is started in this process. Requests differ in prompt, seed, sampler, drafter, constraint and length; while
they are served, others that begin alike come and leave. Each text is compared with what the library writes for the same
request without a server, without company and without a drafter. Nothing is timed. Writes
benchmarks/results/serve_exactness.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx

import decodery as dc
from decodery.constraints import JSONSchema
from decodery.server.run import Server
from decodery.server.settings import GIB, ServerSettings
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parent / "results" / "serve_exactness.json"
TOPICS = ["tides", "bread", "glass", "the moon", "rivers", "clocks", "salt", "bees"]
TASKS = ["Explain {} to a child.", "Write two sentences about {}.", "List three facts about {}.", "Tell a story of {}."]
DRAFTERS = ["auto", "none", "prompt-lookup:length=5", "draft-model", "token-recycling"]
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}},
    "required": ["title", "count"],
    "additionalProperties": False,
}


def requests(number: int, tokens: int) -> list[dict[str, Any]]:
    """Bodies of chat completions, by one seed."""
    chance = random.Random(0)
    found = []
    for seed in range(number):
        content = chance.choice(TASKS).format(chance.choice(TOPICS))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "seed": seed}
        body |= {"max_tokens": chance.randint(tokens // 2, tokens), "temperature": chance.choice([0.0, 0.7, 1.0])}
        body |= {"top_p": chance.choice([1.0, 0.9]), "frequency_penalty": chance.choice([0.0, 0.3])}
        body["decodery"] = {"drafter": chance.choice(DRAFTERS)}
        if chance.random() < 0.2:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        found.append(body)
    return found


async def together(url: str, bodies: list[dict[str, Any]], aborts: int) -> list[str]:
    """All at once, while others come and leave."""
    chance = random.Random(1)
    limits = httpx.Limits(max_connections=len(bodies) + aborts)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:

        async def whole(body: dict[str, Any]) -> str:
            await asyncio.sleep(chance.random())
            answer = await http.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                raise SystemExit(f"refused: {body} {answer.text}")
            return str(answer.json()["choices"][0]["message"]["content"])

        async def leaves(body: dict[str, Any]) -> None:
            await asyncio.sleep(chance.random() * 5)
            most = chance.randint(1, 10)
            async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    most -= bool(line)
                    if most <= 0:
                        return

        leaving = [leaves(chance.choice(bodies)) for _ in range(aborts)]
        texts = await asyncio.gather(*map(whole, bodies), *leaving)
        return [text for text in texts if text is not None]


def alone(lm: dc.LLM, body: dict[str, Any]) -> str:
    """The same request, by the library and by itself."""
    settings = {name: body[name] for name in ("seed", "temperature", "top_p", "frequency_penalty")}
    if "response_format" in body:
        settings["constraint"] = JSONSchema(SCHEMA)
    output = lm.generate(body["messages"], max_new_tokens=body["max_tokens"], drafter=None, **settings)
    assert isinstance(output, dc.Output)
    return output.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--aborts", type=int, default=32)
    chosen = parser.parse_args()
    lm = dc.load("smollm2")
    urls: list[str] = []
    started = threading.Event()

    def told(url: str) -> None:
        urls.append(url)
        started.set()

    server = Server(lm, ServerSettings(name="smollm2", kv_bytes=2 * GIB, drain_seconds=0.0), port=0, on_ready=told)
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait()
    bodies = requests(chosen.requests, chosen.tokens)
    texts = asyncio.run(together(urls[0], bodies, chosen.aborts))
    load = server.front.service.load
    server.stop()
    thread.join()
    differ = [number for number, body in enumerate(bodies) if alone(lm, body) != texts[number]]
    result = {
        "requests": len(bodies),
        "left early": chosen.aborts,
        "texts that differ": len(differ),
        "passes": load.passes,
        "prompt tokens found in the prefix cache": load.prefix_found,
        "of": load.prefix_asked,
        "preemptions": load.preemptions,
    }
    write_result(OUT, result, summary=list(result))
    print(json.dumps(result, indent=1))
    if differ:
        print("they differ:", json.dumps([bodies[number] for number in differ[:3]]))


if __name__ == "__main__":
    main()
