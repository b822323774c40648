"""`transformers`: greedy or sampled `generate`, plain and with its own prompt lookup."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from time import perf_counter
from typing import Any

import torch

from .base import Order, Peer, Told, UnavailableError, checkpoint

LOOKUP_TOKENS = 10
"""Tokens copied per lookup, as its documentation advises."""


class _Clock:
    """A streamer: `generate` hands it the prompt, then every run of tokens as it is accepted."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.runs: list[list[int]] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.runs.append(value.reshape(-1).tolist())
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class Transformers(Peer):
    model: Any
    options: dict[str, Any]

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], dtype=torch.int64, device=self.model.device)
        clock, begin = _Clock(), perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=clock,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.order.eos_ids) or None,
            pad_token_id=(*self.order.eos_ids, 0)[0],
            **self.options,
        )
        emitted = [len(run) for run in clock.runs[1:]]
        tokens = output[0, len(prompt) :].tolist()
        return Told(tokens, emitted, clock.times[-1] - clock.times[0], clock.times[0] - begin)


def load_transformers(order: Order) -> Any:
    """The checkpoint as a transformers model."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise UnavailableError("transformers is not installed") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = checkpoint(order.model)
    place, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        # The bar of its GGUF reader cannot be switched off and would write across ours.
        with redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, order.dtype), **options)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise UnavailableError(f"transformers cannot load {path.name}: {str(error).splitlines()[0]}") from error
    # Its own defaults for sampling must not mix into ours.
    model.generation_config = type(model.generation_config)()
    return model.eval().to(order.device)


def open_peer(order: Order) -> Peer:
    peer = Transformers(order, order.dtype)
    peer.model = load_transformers(order)
    peer.options = {"do_sample": False}
    if order.temperature > 0:
        peer.options = {"do_sample": True, "temperature": order.temperature, "top_k": 0, "top_p": 1.0}
    if order.name == "transformers-lookup":
        peer.options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    return peer
