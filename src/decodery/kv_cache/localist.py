"""Localist attention: a dial from attention over all of a text to attention within blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State


@register(
    "localist",
    paper="Localist LLMs with Recruitment Learning (2025)",
    guarantee="dial=0 is the model itself; otherwise lossy, and drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class Localist(CachePolicy):
    """Lowers attention scores outside of a token's own block by -log(1 - dial); 1 leaves the block alone.

    Where the model gives a share m of its attention to other blocks, that becomes m (1 - dial) / (1 - m dial). Nothing
    is dropped; at 1 a row reads sinks and its block alone. The paper, which has no public code, cuts a vocabulary into
    blocks by meaning and learns them with a penalty; this is its dial for a model as it is.

    Attributes:
        dial: From 0, all of the text, to 1.
        block: Positions of a block; blocks are those of the text, one after the other.
        sinks: The first positions, which are in every block's reach.
    """

    dial: float = 0.6
    block: int = 64
    sinks: int = 4

    provides = Provides(layer_plans=True, keys=True)

    def __post_init__(self) -> None:
        if not 0 <= self.dial <= 1:
            raise SettingsError(f"the dial of localist should be from 0 to 1, not {self.dial}")
        if self.block < 1 or self.sinks < 0:
            raise SettingsError("localist needs a block of at least 1 and sinks of at least 0")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Dialled(self, model.config, prompt)


class Dialled(State):
    """Blocks are a function of positions alone; nothing is remembered."""

    def __init__(self, method: Localist, *about: object) -> None:
        super().__init__(*about)  # type: ignore[arg-type]
        self.method = method

    def fork(self) -> Dialled:
        return self

    def select(self, attention: Attention) -> np.ndarray | None:
        cache, segment, method = attention.segment.cache, attention.segment, self.method
        assert cache is not None
        if not method.dial:
            return None
        slots = cache.positions[attention.layer, : attention.seen.shape[-1]]
        own = slots[None, :] // method.block == segment.positions[:, None] // method.block
        reached: np.ndarray = own | (slots < method.sinks)
        if method.dial == 1:
            return reached
        seen = attention.seen if attention.seen.ndim == 2 else attention.seen.any(axis=0)
        # Whether anything is lowered for a row must not hang on rows that it does not see.
        lowered = torch.from_numpy(np.where(seen & ~reached, math.log1p(-method.dial), 0.0))
        attention.bias = lowered if attention.bias is None else attention.bias + lowered
        return None
