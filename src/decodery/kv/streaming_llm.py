"""StreamingLLM: the first tokens and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SettingsError
from ..model.blocks import SLOTS
from ..model.cache import KVCache
from ..model.config import ModelConfig
from ..model.policy import Attention, AttentionPolicy
from ..model.protocol import LanguageModel
from ..registry import register
from .base import CachePolicy, State, require_budget, window_begins


@register(
    "streaming-llm",
    paper="Efficient Streaming Language Models with Attention Sinks (2023)",
    guarantee="lossy: old tokens are gone for good; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class StreamingLLM(CachePolicy):
    """Keeps the first tokens, which attention rests on, and a window of the last ones; the middle is dropped.

    budget: see `CachePolicy`; the published 4 + 512 tokens. sinks: how many of them are the first ones. Every row reads
    its own window, of the prompt too, so that texts do not depend on how they were read. Tokens keep the positions they
    were read at, as most libraries have it; the paper counts positions inside of the cache, which matters beyond the
    length a model was trained for: texts end where the model's context does. Class C. Memory: the budget and a block
    of 16.
    """

    budget: float = 516
    sinks: int = 4

    def __post_init__(self) -> None:
        require_budget("streaming-llm", self.budget)
        if self.sinks < 0:
            raise SettingsError(f"sinks of streaming-llm must be at least 0, not {self.sinks}")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Streaming(self, model.config, prompt)

    def begins(self, position: int) -> int:
        """Where the window of a row at `position` begins."""
        return window_begins(self.budget, self.sinks, position)


class Streaming(State):
    """Windows are a function of positions alone; nothing is remembered."""

    def __init__(self, method: StreamingLLM, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method = method

    def fork(self) -> Streaming:
        return self

    def select(self, attention: Attention) -> np.ndarray:
        cache, segment = attention.segment.cache, attention.segment
        assert cache is not None
        slots = cache.positions[attention.layer, : attention.seen.shape[-1]]
        begins = np.array([self.method.begins(int(position)) for position in segment.positions])
        return (slots < self.method.sinks) | (slots >= begins[:, None])

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        # By whole blocks, wherever passes end: what is held is a function of the text's length.
        begins = self.method.begins(cache.next_position) // SLOTS * SLOTS
        if not rows or begins <= self.method.sinks:
            return
        for layer, length in enumerate(cache.lengths.tolist()):
            # Slots are in the order of positions; those that no row will read again lie together.
            places = cache.positions[layer, :length]
            first, last = np.searchsorted(places, [self.method.sinks, begins]).tolist()
            if last > first:
                cache.evict(layer, range(first, last))
