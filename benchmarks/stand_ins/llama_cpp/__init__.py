"""What the benchmarks call of llama-cpp-python, over xllamacpp: the same llama.cpp, in wheels that need no compiler.

    PYTHONPATH=benchmarks/stand_ins python benchmarks/prefill_peers.py ...

Reading prompts and writing greedily: that is what it is timed for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

import xllamacpp

_MOST = 64
"""Tokens of a text."""


class Llama:
    """A model; prompts are token ids, and the most likely next one is said."""

    def __init__(self, path: str, n_ctx: int, n_threads: int, n_threads_batch: int, **_: Any) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.n_predict = path, n_ctx, 1, 1
        params.cpuparams.n_threads, params.cpuparams_batch.n_threads = n_threads, n_threads_batch
        params.cache_prompt, params.warmup = False, False
        self._server = xllamacpp.Server(params)

    def reset(self) -> None:
        """Nothing is kept between prompts."""

    def set_seed(self, seed: int) -> None:
        """Nothing is drawn."""

    def eval(self, tokens: list[int]) -> None:
        """Read a prompt and find the token that follows."""
        asked = {"prompt": tokens, "max_tokens": 1, "temperature": 0.0, "cache_prompt": False, "return_tokens": True}
        self._said = self._server.handle_completions(asked)
        assert self._said["usage"]["prompt_tokens"] == len(tokens), self._said["usage"]

    def tokenize(self, text: bytes) -> str:
        """A prompt that is text stays so: the server makes tokens of it."""
        return text.decode()

    def generate(self, prompt: list[int] | str, **_: Any) -> Iterator[int]:
        """Tokens as they are written, a number for each; the caller stops when it has enough."""
        if not isinstance(prompt, str):
            self.eval(prompt)
            yield from self._said.get("tokens") or [-1]
            return
        asked = {"prompt": prompt, "max_tokens": _MOST, "temperature": 0.0, "cache_prompt": False}
        asked |= {"stream": True, "ignore_eos": True, "return_tokens": True}
        written: SimpleQueue[int | None] = SimpleQueue()

        def told(chunk: Any) -> bool:
            for part in chunk if isinstance(chunk, list) else [chunk]:
                known = json.loads(part) if isinstance(part, str) else part
                for choice in known.get("choices", ()):
                    if choice.get("finish_reason") is None:
                        written.put(1)
            return False

        def ask() -> None:
            self._server.handle_completions(asked, told)
            written.put(None)

        asking = Thread(target=ask)
        asking.start()
        try:
            while (token := written.get()) is not None:
                yield token
        finally:
            # A process may not end while the server writes.
            asking.join()
