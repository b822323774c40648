"""Sequential unmasking: the first open positions are written, as many in every pass."""

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
    guarantee="the model's own choice from left to right, one token a pass; with fewer steps tokens of one pass do not "
    "know of each other",
)
@dataclass(frozen=True)
class Sequential(Scheduled):
    """Writes the first open positions of every pass, by default one.

    Attributes:
        steps: Passes over the whole canvas, as many for every block; None is one a token.
        schedule: "even", or "dream" as Dream's code shares them out.
    """

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        return view.at(np.arange(min(memory[0] if memory else 1, len(view)))), memory[1:]
