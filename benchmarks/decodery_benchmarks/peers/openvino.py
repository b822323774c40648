"""OpenVINO GenAI on the same GGUF file: plain, and with its prompt lookup."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from .base import Order, Peer, Told, UnavailableError, gguf
from .llama_cpp import main_type

_LOOKUP_TOKENS, _NGRAM = 10, 3
"""Tokens copied per lookup, as the other programs have them, and the longest match that is looked for."""


class OpenVino(Peer):
    """pipeline, config: of the program; watched: what is told of tokens as they come."""

    pipeline: Any
    config: Any
    watched: Any

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        import numpy as np
        import openvino

        self.config.max_new_tokens, self.config.rng_seed = max_new_tokens, seed % (1 << 32)
        self.watched.runs, self.watched.times = [], []
        begin = perf_counter()
        self.pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), self.config, self.watched)
        runs, times = self.watched.runs, self.watched.times
        tokens = [token for run in runs for token in run]
        emitted = [len(run) for run in runs[1:]]
        # How many rows a lookup found, nobody is told.
        rows = 0 if self.order.peer == "openvino-lookup" else len(emitted)
        return Told(tokens, emitted, times[-1] - times[0], times[0] - begin, rows=rows)


def open_peer(order: Order) -> Peer:
    try:
        import openvino_genai as genai
    except (ImportError, OSError) as error:
        raise UnavailableError("openvino-genai is not installed") from error

    class Watched(genai.StreamerBase):  # type: ignore[misc, unused-ignore]
        """Keeps what every pass says, and when."""

        def write(self, tokens: int | list[int]) -> Any:
            self.times.append(perf_counter())
            self.runs.append([tokens] if isinstance(tokens, int) else list(tokens))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    path, lookup = gguf(order.model), order.peer == "openvino-lookup"
    config = genai.GenerationConfig()
    config.stop_token_ids = set(order.eos_ids)
    config.do_sample = order.temperature > 0
    if config.do_sample:
        config.temperature = order.temperature
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = _LOOKUP_TOKENS, _NGRAM
    options = {"prompt_lookup": True} if lookup else {}
    peer = OpenVino(order, main_type(path))
    try:
        peer.pipeline = genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=order.threads, **options)
    except RuntimeError as error:
        said = str(error).strip().splitlines() or ["it does not say why"]
        raise UnavailableError(f"OpenVINO GenAI cannot load {path.name}: {said[-1].strip()}") from error
    peer.config, peer.watched = config, Watched()
    return peer
