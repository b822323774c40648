"""Localist attention: a setting between attention over all of a text and attention within blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.kernel_policy import KernelPolicy, Lowered, whole
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State


@register(
    "localist",
    paper="Localist LLMs with Recruitment Learning (2025)",
    guarantee="dial=0 is the model itself; otherwise lossy, and drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class Localist(CachePolicy):
    """Lowers attention scores outside a token's own block by -log(1 - dial).

    If the model gives a share m of its attention to other blocks, the share becomes m (1 - dial) / (1 - m dial). No
    token is dropped; at dial=1 a row reads only the sinks and its own block. The paper has no public code. It splits a
    vocabulary into blocks by meaning and trains them with a penalty; here the same setting works on a trained model.

    Attributes:
        dial: From 0, attention over all of the text, to 1, attention within the block.
        block: Positions per block; the text is split into consecutive blocks.
        sinks: Number of first positions that rows of all blocks read.
    """

    dial: float = 0.6
    block: int = 64
    sinks: int = 4

    provides = Provides(layer_plans=True, keys=True)

    def __post_init__(self) -> None:
        if not 0 <= self.dial <= 1:
            raise SettingsError(f"localist: dial must be from 0 to 1, not {self.dial}")
        if self.block < 1 or self.sinks < 0:
            raise SettingsError("localist needs a block of at least 1 and sinks of at least 0")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Dialled(self, model.config, prompt)


class Dialled(State):
    """Blocks depend only on positions, so there is no state."""

    def __init__(self, method: Localist, *about: object) -> None:
        super().__init__(*about)  # type: ignore[arg-type]
        self.method = method

    def fork(self) -> Dialled:
        return self

    def wanted(self, segment: Segment) -> bool:
        return self.method.dial > 0

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        cache, method, positions = segment.cache, self.method, segment.positions
        assert cache is not None
        seen = cache.length + segment.seen().sum(axis=1)
        if method.dial == 1 or not whole(cache) or (seen != positions + 1).any():
            return None
        # Rows see one slot for every position up to their own.
        own = positions // method.block * method.block
        spans = np.stack((np.minimum(method.sinks, own), own), axis=1).astype(np.int32)
        return KernelPolicy(lowered=Lowered(spans, math.log1p(-method.dial)))

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
        # Whether a row's scores are lowered must not depend on rows that it does not attend to.
        lowered = torch.from_numpy(np.where(seen & ~reached, math.log1p(-method.dial), 0.0))
        attention.bias = lowered if attention.bias is None else attention.bias + lowered
        return None
