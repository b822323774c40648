"""Factor decoding: the more tokens a pass writes, the more confident all of them must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import UnmaskingPolicy
from .view import Commit, View


@register(
    "factor",
    paper="Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025)",
    guarantee="with phi below 1 and exact marginals, tokens of one pass are the most likely together at temperature 0",
)
@dataclass(frozen=True)
class Factor(UnmaskingPolicy):
    """Writes the n most confident proposals, the largest n with (n + 1)(1 - lowest confidence) <= phi.

    If n tokens each have a probability above 1 - e, and (n + 1) e is below 1, they are jointly the most likely n
    tokens.

    Attributes:
        phi: Bound of (n + 1)(1 - lowest confidence); a smaller one writes fewer tokens.
    """

    phi: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.phi < float("inf"):
            raise SettingsError(f"factor: phi must be 0 or more, not {self.phi}")

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        sure = view.confidence[view.order]
        counts = np.arange(1, len(view) + 1)
        fits = (counts + 1) * (1 - sure) <= self.phi
        fits[0] = True
        return view.top(int(fits.cumprod().sum())), memory
