"""LServe: streaming heads keep a window, and the other heads read selected pages, which are reused for some rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.page_pool import SLOTS
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.models.trained.head_gates import HeadGates
from decodery.step.cache_policy import CachePolicy, State, require_budget, window_begins

from .quest import best_pages
from .selecting import Asked


@register(
    "lserve",
    paper="LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention (2025)",
    guarantee="lossy: some heads lose old tokens, others read pages; drafts give the text of plain decoding under it",
    requirements=("head gates",),
)
@dataclass(frozen=True)
class LServe(CachePolicy):
    """Streaming heads keep the first tokens and a window; the others read selected pages of all tokens.

    Pages are selected for a group of query heads together; the published code selects for every head. Streaming heads
    store only the tokens that they read. Classes A and C.

    Attributes:
        budget: Budget of the other heads, rounded up to pages of `page` tokens. A page's score is the largest of its
            parts of `logical` tokens, each from an upper bound as in Quest. The page of the row itself is always read.
        window: Budget of a streaming head, see `CachePolicy`, its `sinks` included; it applies to rows of the prompt
            too.
        sinks: First tokens that streaming heads keep.
        sparsity: Share of all key-value heads that are streaming heads, those with the lowest gates.
        gates: `HeadGates`, or the file or folder of `decodery train kv lserve`.
        page: Tokens per page.
        logical: Tokens per part of a page that has its own bound.
        reuse: Pages are selected at every position that is a multiple of this; rows between reuse the last selection.
        least: Minimum number of pages to read.
    """

    budget: float = 4096
    window: float = 384
    sinks: int = 128
    sparsity: float = 0.5
    gates: HeadGates | str | None = None
    page: int = 64
    logical: int = 16
    reuse: int = 4
    least: int = 3

    def __post_init__(self) -> None:
        require_budget("lserve", self.budget)
        require_budget("a streaming head of lserve", self.window)
        if not 0 <= self.sparsity <= 1 or self.sinks < 0 or min(self.page, self.logical, self.reuse, self.least) < 1:
            raise SettingsError(
                "lserve needs a sparsity between 0 and 1, sinks >= 0, and page, logical, reuse and least >= 1"
            )
        if self.page % self.logical or self.page % self.reuse:
            raise SettingsError(
                f"lserve: logical and reuse must divide a page of {self.page} tokens, or tokens would be missed, not "
                f"logical={self.logical} and reuse={self.reuse}"
            )

    @property
    def provides(self) -> Provides:
        return Provides()

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        gates = HeadGates.load(self.gates, "lserve:gates")
        gates.require(model)
        return Serving(replace(self, gates=gates), gates.lowest(self.sparsity), model.config, prompt)


class Serving(State):
    """State of the policy: the streaming heads and the selected pages.

    Selected pages [kv_heads, pages] bool are stored by layer, for the last token of the content and for every tentative
    row; None for a row of the prompt.

    Attributes:
        streams: [layers, kv_heads] bool, true for streaming heads.
    """

    def __init__(self, method: LServe, streams: np.ndarray, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method, self.streams = method, streams
        self._held: dict[int, np.ndarray | None] = {}
        self._behind: dict[int, list[np.ndarray | None]] = {}
        self._end = 0

    def fork(self) -> Serving:
        clone = Serving(self.method, self.streams, self.config, self.prompt)
        clone._held, clone._end = dict(self._held), self._end
        return clone

    def select(self, attention: Attention) -> np.ndarray | None:
        layer, segment, method = attention.layer, attention.segment, self.method
        assert segment.cache is not None
        slots, streams = attention.seen.shape[-1], self.streams[layer]
        places = np.asarray(segment.cache.positions[layer, :slots], dtype=np.int64)
        read = np.ones((len(attention.keys), len(segment), slots), dtype=bool)
        if not streams.all():
            for row, pages in enumerate(self._pages(attention, places)):
                if pages is not None:
                    # Slots after the last of them belong to rows that this one does not attend to.
                    read[:, row] = pages[:, np.minimum(places // method.page, pages.shape[1] - 1)]
        begins = [window_begins(method.window, method.sinks, at) for at in segment.positions.tolist()]
        read[streams] = (places < method.sinks) | (places >= np.array(begins)[:, None])
        return read

    def _pages(self, attention: Attention, places: np.ndarray) -> list[np.ndarray | None]:
        """The pages that each row reads, None for rows of the prompt."""
        layer, segment, method = attention.layer, attention.segment, self.method
        retained, content = segment.retained, len(places) - segment.retained - len(segment)
        states, sight = self._behind.get(layer, [])[:retained], attention.seen_by_any
        chosen: dict[int, np.ndarray] = {}
        for row, position in enumerate(segment.positions.tolist()):
            before = np.flatnonzero(sight[row, content : content + retained + row])
            known = states[before[-1]] if len(before) else self._held.get(layer)
            if position < self.prompt:
                known = None
            elif known is None or position % method.reuse == 0:
                # Rows after this one hold the same array, which is filled below.
                known = np.empty((len(attention.keys), int(places.max()) // method.page + 1), dtype=bool)
                chosen[row] = known
            states.append(known)
        if chosen:
            asked = Asked(attention, np.array(list(chosen)))
            found = best_pages(asked, method.budget, method.page, method.least, method.logical)
            for number, pages in enumerate(chosen.values()):
                pages[:] = found[:, number]
        self._behind[layer] = states
        return states[retained:]

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        if rows:
            self._held.update({layer: states[rows[-1]] for layer, states in self._behind.items()})
            self._end = cache.next_position
            self._stream(cache)
        self._behind = {}

    def cut(self, cache: KVCache) -> None:
        self._behind = {}
        if cache.next_position < self._end:
            # The next row selects new pages.
            self._held, self._end = {}, cache.next_position

    def _stream(self, cache: KVCache) -> None:
        """Drop, in whole blocks, the tokens of streaming heads that no later row reads."""
        method = self.method
        begins = window_begins(method.window, method.sinks, cache.next_position) // SLOTS * SLOTS
        if begins <= method.sinks:
            return
        for layer in self.full_layers:
            heads, length = np.flatnonzero(self.streams[layer]), int(cache.lengths[layer])
            if not len(heads):
                continue
            first, last = np.searchsorted(cache.positions[layer, :length], [method.sinks, begins]).tolist()
            lost = cache.losses.of(layer, length)
            if last > first and (lost is None or not lost[heads[0], last - 1]):
                cache.evict(layer, range(first, last), heads.tolist())
