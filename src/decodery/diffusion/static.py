"""Static decoding: the most confident proposals are written, as many in every pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decodery.core.registry import register

from .scheduled import Scheduled
from .view import Commit, View


@register(
    "static",
    paper="Large Language Diffusion Models (2025)",
    guarantee="the model's own choice, one token a pass; with fewer steps tokens of one pass do not know of each other",
)
@dataclass(frozen=True)
class Static(Scheduled):
    """Writes the most confident proposals of every pass, by default one: the usual baseline.

    LLaDA calls this low-confidence remasking; schedule "even" shares the steps out as its released code does, "dream"
    as Dream's.

    Attributes:
        steps: Passes over the whole canvas, as many for every block; None is one a token.
    """

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        # A cache may have offered fewer places than were due.
        return view.top(memory[0] if memory else 1), memory[1:]
