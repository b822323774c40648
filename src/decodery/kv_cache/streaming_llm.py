"""StreamingLLM: keeps the first tokens and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kernel_policy import KernelPolicy, Windows
from decodery.models.cache.page_pool import SLOTS
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State, require_budget, window_begins

from .after_prompt import angles, turned


@register(
    "streaming-llm",
    paper="Efficient Streaming Language Models with Attention Sinks (2023)",
    guarantee="lossy: old tokens are dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class StreamingLLM(CachePolicy):
    """Keeps the first tokens, which receive much attention, and a window of the last ones.

    The tokens between are dropped. Every row reads its own window, rows of the prompt too, so that a text does not
    depend on how its prompt is split into passes. As in the paper, positions are counted among the kept tokens: the
    first tokens are placed directly before the window. So with a budget in tokens, a text may be longer than the
    model's context. Class C. Memory: the budget and a block of 16.

    Attributes:
        budget: See `CachePolicy`; by default the published 4 + 512 tokens.
        sinks: Number of first tokens that are kept, part of the budget.
        absolute: Whether tokens keep their original positions, as in most libraries; the text then ends at the end of
            the context.
    """

    budget: float = 516
    sinks: int = 4
    absolute: bool = False

    def __post_init__(self) -> None:
        require_budget("streaming-llm", self.budget)
        if self.sinks < 0:
            raise SettingsError(f"streaming-llm: sinks must be at least 0, not {self.sinks}")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Streaming(self, model.config, prompt)

    def endless(self, config: ModelConfig) -> bool:
        # Learned position embeddings end at the model's context.
        return not (self.absolute or config.learned_positions) and 1 < self.budget <= config.max_positions

    def begins(self, position: int) -> int:
        """First position of the window of a row at `position`."""
        return window_begins(self.budget, self.sinks, position)


class Streaming(State):
    """Windows depend only on positions, so there is no state."""

    anew = True

    def __init__(self, method: StreamingLLM, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method = method

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return not self.method.absolute and self.method.sinks > 0

    @property
    def most(self) -> int | None:  # type: ignore[override]
        windows = (self.config.window(layer) or 0 for layer in range(self.config.num_layers))
        return max(int(self.method.budget), *windows) + SLOTS if self.method.budget > 1 else None

    @property
    def untouched(self) -> int:  # type: ignore[override]
        # These see all tokens before them.
        return int(self.method.budget) if self.method.budget > 1 else 0

    def fork(self) -> Streaming:
        return self

    def select(self, attention: Attention) -> np.ndarray:
        slots, begins = _places(attention), self._begins(attention)[:, None]
        # Sinks whose position differs from the original one are attended to separately, in `merge`.
        return ((slots < self.method.sinks) | (slots >= begins)) & ~self.also(attention)

    def also(self, attention: Attention) -> np.ndarray:
        moved = self.merges & (self._begins(attention) > self.method.sinks)[:, None]
        return np.asarray(attention.seen_by_any & (_places(attention) < self.method.sinks) & moved)

    def merge(self, attention: Attention) -> torch.Tensor:
        context, mass = attention.context, attention.mass
        assert context is not None and mass is not None
        met = self.also(attention)
        rows, slots = np.flatnonzero(met.any(axis=1)), np.flatnonzero(met.any(axis=0))
        if not len(rows):
            return context
        nearer = self._begins(attention)[rows] - self.method.sinks
        # Row by row and in double precision, so that a row does not depend on other rows of the pass.
        queries = attention.queries[rows].double().transpose(0, 1)
        queries = turned(self.config, attention.layer, queries, -nearer).transpose(0, 1)
        keys, values = (part[:, slots].double() for part in (attention.keys, attention.values))
        grouped = queries.unflatten(1, (len(keys), -1))[:, :, :, None]
        scores = (grouped * keys[:, None]).sum(dim=-1)  # [rows, kv_heads, group, sinks]
        hidden = torch.from_numpy(~met[np.ix_(rows, slots)]).to(scores.device)[:, None, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        first = (scores.softmax(dim=-1)[..., None] * values[:, None]).sum(dim=-2).flatten(1, 2)
        share = torch.sigmoid(mass[rows].double() - scores.logsumexp(dim=-1).flatten(1))[..., None]
        found = context.clone()
        found[rows] = (share * context[rows].double() + (1 - share) * first).to(context.dtype)
        return found

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        cache, config = segment.cache, self.config
        assert cache is not None
        ropes = {config.layer_rope(layer) for layer in self.full_layers}
        if cache.prefix or config.latent is not None or len(ropes) != 1:
            return None
        at, begins = segment.positions, np.array([self.method.begins(int(each)) for each in segment.positions])
        far = begins > self.method.sinks
        nearer = np.where(far & self.merges, begins - self.method.sinks, 0)
        cos, sin = (each.float() for each in angles(config, self.full_layers[0], -nearer))
        widths = np.where(far, at + 1 - begins, 0).astype(np.int32)
        return KernelPolicy(windows=Windows(widths, self.method.sinks, (cos, sin)))

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        # Whole blocks are dropped, so that the kept tokens depend only on the text's length, not on the passes.
        if not rows:
            return
        for layer, length in enumerate(cache.lengths.tolist()):
            window = self.config.window(layer)
            sinks = self.method.sinks if window is None else 0
            begins = self.method.begins(cache.next_position) if window is None else cache.next_position + 1 - window
            # Slots are in the order of positions, so the slots that no later row reads are adjacent.
            places = cache.positions[layer, :length]
            first, last = np.searchsorted(places, [sinks, begins // SLOTS * SLOTS]).tolist()
            if last > first:
                cache.evict(layer, range(first, last))

    def _begins(self, attention: Attention) -> np.ndarray:
        """[n] first position of the window of each row."""
        return np.array([self.method.begins(int(position)) for position in attention.segment.positions])


def _places(attention: Attention) -> np.ndarray:
    """[slots] positions."""
    cache = attention.segment.cache
    assert cache is not None
    return cache.positions[attention.layer, : attention.seen.shape[-1]]
