"""A real server over a real socket, in this process, on a tiny model in float64 or on the embedded one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from openai import OpenAI

from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.chat import ChatTemplate
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.server.run import Server
from decodery.server.served import ModelSource
from decodery.server.settings import ServerSettings
from decodery.testing import tiny_transformer
from tiny_models import make_tokenizer

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KNOWS_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + TEMPLATE
VOCAB = 260
"""A token per byte, and four special ones."""
SECONDS = 60.0
LONG = 1900
"""Tokens that take a tiny model seconds."""


def tiny_lm(template: str | None = TEMPLATE, seed: int = 1, **model: Any) -> LLM:
    """A tiny model in float64 whose tokens are bytes; what it writes is noise."""
    tokenizer = Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))
    chat = None if template is None else ChatTemplate(template)
    made = tiny_transformer(seed, vocab_size=VOCAB, **{"max_positions": 2048} | model)
    return LLM(LoadedModel(made, tokenizer, chat, "tiny", "float64"))


@contextmanager
def serving(lm: LLM, more: Sequence[ModelSource] = (), size: int = 0, **settings: Any) -> Iterator[tuple[Server, str]]:
    """A server of this model, and of `more`, and its address."""
    urls: list[str] = []
    limits = ServerSettings(**{"name": lm.name, "drain_seconds": 0.0} | settings)
    server = Server(lm, limits, more, size, port=0, on_ready=urls.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: bool(urls) or not thread.is_alive())
    try:
        yield server, urls[0]
    finally:
        server.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()


def client(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=SECONDS)


def wait_until(done: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for what another thread does; fail where it never does."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "what was waited for never happened"
        time.sleep(0.005)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def post(url: str, path: str = "/v1/completions", key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + path, json={"prompt": "x", "max_tokens": 4, **body}, headers=headers, timeout=SECONDS)


@contextmanager
def streaming(url: str, **body: Any) -> Iterator[Iterator[str]]:
    """The events of a long text, of which the first has come."""
    asked = {"prompt": "x", "max_tokens": LONG, "stream": True, "ignore_eos": True, **body}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        events = (line for line in answer.iter_lines() if line)
        next(events)
        yield events


def left_nothing(server: Server) -> None:
    """Nobody is in progress, and of the memory for keys and values only what is kept for later texts is held."""
    service = server.front.service
    wait_until(lambda: service.idle and not service._busy and service.load.running == 0)
    service._prefixes.clear()
    assert service._engine.held_bytes == 0
