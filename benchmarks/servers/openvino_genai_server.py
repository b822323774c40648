"""OpenVINO GenAI's continuous batching after the one route that a measurement of load needs.

    python openvino_genai_server.py MODEL.gguf PORT

Runs in an environment of its own, with openvino-genai, starlette and uvicorn; knows nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

CACHE_GIB = 2


class Engine:
    """The pipeline on a thread of its own. Every request has a queue on the network's loop, which gets its tokens."""

    def __init__(self, path: str) -> None:
        settings = genai.SchedulerConfig()
        settings.cache_size = CACHE_GIB
        settings.dynamic_split_fuse = True
        self.pipeline = genai.ContinuousBatchingPipeline(path, settings, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.wake = threading.Condition()
        self.new: list[tuple[int, str, Any, asyncio.Queue[list[int] | None]]] = []
        self.count = 0
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, prompt: str, config: Any) -> asyncio.Queue[list[int] | None]:
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()
        with self.wake:
            self.count += 1
            self.new.append((self.count, prompt, config, queue))
            self.wake.notify()
        return queue

    def run(self) -> None:
        open_: dict[int, tuple[Any, asyncio.Queue[list[int] | None]]] = {}
        while True:
            with self.wake:
                while not (self.new or open_):
                    self.wake.wait()
                new, self.new = self.new, []
            for number, prompt, config, queue in new:
                open_[number] = (self.pipeline.add_request(number, prompt, config), queue)
            self.pipeline.step()
            for number, (handle, queue) in list(open_.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        loop.call_soon_threadsafe(queue.put_nowait, list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    loop.call_soon_threadsafe(queue.put_nowait, None)
                    del open_[number]


async def models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": "model", "object": "model"}]})


async def chat(request: Request) -> StreamingResponse:
    body = await request.json()
    prompt = engine.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
    config = genai.GenerationConfig()
    config.max_new_tokens = body["max_tokens"]
    config.apply_chat_template = False
    config.do_sample = body["temperature"] > 0
    if config.do_sample:
        config.temperature, config.rng_seed = body["temperature"], body["seed"]
    return StreamingResponse(events(engine.submit(prompt, config), prompt), media_type="text/event-stream")


async def events(queue: asyncio.Queue[list[int] | None], prompt: str) -> AsyncIterator[str]:
    tokens: list[int] = []
    sent = ""
    while (more := await queue.get()) is not None:
        tokens += more
        text = engine.tokenizer.decode(tokens)
        if text.startswith(sent) and len(text) > len(sent) and not text.endswith("�"):
            chunk = {"choices": [{"index": 0, "delta": {"content": text[len(sent) :]}}]}
            sent = text
            yield f"data: {json.dumps(chunk)}\n\n"
    length = engine.tokenizer.encode(prompt, add_special_tokens=False).input_ids.shape[1]
    usage = {"prompt_tokens": length, "completion_tokens": len(tokens), "total_tokens": length + len(tokens)}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


async def main() -> None:
    global loop
    loop = asyncio.get_running_loop()
    app = Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])
    await uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[2]), log_level="warning")).serve()


if __name__ == "__main__":
    engine = Engine(sys.argv[1])
    asyncio.run(main())
