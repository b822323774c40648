"""Entropy-bounded unmasking: as many of the surest proposals are written as know enough without each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import UnmaskingPolicy
from .view import Commit, View


@register(
    "entropy-bounded",
    paper="Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking (2025)",
    guarantee="with exact marginals, tokens of one pass share at most gamma nats of information",
)
@dataclass(frozen=True)
class EntropyBounded(UnmaskingPolicy):
    """Writes as many of the surest proposals as share at most gamma nats.

    Beside the largest, their entropies sum to at most gamma. That sum bounds the information that the tokens share,
    which writing them at once leaves out. SDAR's released sampler has a bound of this name on another sum, which is not
    this one.

    Attributes:
        gamma: The bound in nats; 0 writes one token a pass, and others that have no entropy.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma < float("inf"):
            raise SettingsError(f"entropy-bounded: gamma must be 0 or more, not {self.gamma}")

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        unsure = view.entropy[view.order]
        shared = np.cumsum(unsure) - np.maximum.accumulate(unsure)
        # Of one token alone there is nothing to share; rounding must not say otherwise.
        shared[0] = 0.0
        return view.top(int((shared <= self.gamma).cumprod().sum())), memory
