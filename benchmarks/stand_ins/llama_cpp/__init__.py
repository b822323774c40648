"""What the benchmarks call of llama-cpp-python, over xllamacpp: the same llama.cpp, in wheels that need no compiler.

    PYTHONPATH=benchmarks/stand_ins python benchmarks/prefill_peers.py ...

Reading a prompt and its first token alone: that is what it is timed for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xllamacpp


class Llama:
    """A model; prompts are token ids, and the likeliest next one is said."""

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

    def generate(self, prompt: list[int], **_: Any) -> Iterator[int]:
        self.eval(prompt)
        yield from self._said.get("tokens") or [-1]
