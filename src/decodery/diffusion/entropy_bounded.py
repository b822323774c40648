"""Entropy-bounded unmasking: a pass writes as many confident proposals as are nearly independent of each other."""

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
    """Writes as many of the most confident proposals as share at most gamma nats.

    Their entropies, without the largest one, sum to at most gamma. This sum bounds the information that the tokens
    share, which is lost when they are written at once. SDAR's released sampler uses the same name for a bound on a
    different sum.

    Attributes:
        gamma: The bound in nats; 0 writes one token per pass, and others only if their entropy is 0.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma < float("inf"):
            raise SettingsError(f"entropy-bounded: gamma must be 0 or more, not {self.gamma}")

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        unsure = view.entropy[view.order]
        shared = np.cumsum(unsure) - np.maximum.accumulate(unsure)
        # One token shares no information; set it to 0 exactly, which rounding would not.
        shared[0] = 0.0
        return view.top(int((shared <= self.gamma).cumprod().sum())), memory
