"""Sequential unmasking: every pass writes the first open positions, a fixed number of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.registry import register

from .scheduled import Scheduled
from .view import Commit, View


@register(
    "sequential",
    paper="SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation (2025)",
    guarantee="the model's own choice from left to right, one token a pass; with fewer steps tokens of one pass are "
    "chosen independently of each other",
)
@dataclass(frozen=True)
class Sequential(Scheduled):
    """Writes the first open positions in every pass, by default one.

    Attributes:
        steps: Passes over the whole canvas, the same number for every block; None is one per token.
        schedule: How many tokens each pass writes: "even", or "dream" as in Dream's code.
    """

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        return view.at(np.arange(min(memory[0] if memory else 1, len(view)))), memory[1:]
