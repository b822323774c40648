"""`economize`: its decoding loop over a transformers model, plain and with its prompt lookup."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from .base import Order, Peer, Told, UnavailableError
from .transformers_generate import LOOKUP_TOKENS, load_transformers


class Economize(Peer):
    model: Any
    selector: Any

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        times: list[float] = []

        def stop(row: torch.Tensor) -> bool:
            """Called after every token with all there are; the first time right after the prompt was read."""
            times.append(perf_counter())
            return int(row[-1]) in self.order.eos_ids

        ids = torch.tensor(prompt, dtype=torch.int64, device=self.model.base_model.device)
        begin = perf_counter()
        result = self.model.decode(ids, max_new_tokens, selector=self.selector(seed), stop=stop)
        end = perf_counter()
        tokens = result.tokens.tolist()
        passes = [(event.position, event.tokens) for event in result.cost.events if event.kind == "exact"][1:]
        # A pass begins with the last token, so the next one begins as much later as it emitted.
        begins = [*(position for position, _ in passes), len(prompt) + len(tokens) - 1]
        emitted = [after - before for before, after in pairwise(begins)]
        return Told(tokens, emitted, end - times[0], times[0] - begin, rows=sum(count for _, count in passes))


def open_peer(order: Order) -> Peer:
    try:
        import economize
        from economize.techniques.lookup import LookupConfig
    except ImportError as error:
        raise UnavailableError("economize is not installed") from error
    sampled = order.temperature > 0
    techniques, decoding = [], economize.DecodeConfig(cycle_length=1, sync_interval=1)
    if order.name == "economize-lookup":
        techniques = [LookupConfig()]
        verifier = {"verifier": "rejection"} if sampled else {}
        decoding = economize.DecodeConfig(cycle_length=LOOKUP_TOKENS + 1, **verifier)
    peer = Economize(order, order.dtype)
    peer.model = economize.apply(load_transformers(order), *techniques, decoding=decoding)
    peer.selector = lambda seed: (
        economize.TopPSampler(temperature=order.temperature, top_p=1.0, seed=seed, device=order.device)
        if sampled
        else None
    )
    return peer
