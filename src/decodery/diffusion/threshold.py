"""Threshold decoding: every proposal whose confidence reaches a threshold is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decodery.core.registry import register

from .base import UnmaskingPolicy, require_share
from .view import Commit, View


@register(
    "threshold",
    paper="Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025)",
    guarantee="tokens of one pass are each likely, and are chosen independently of each other",
)
@dataclass(frozen=True)
class Threshold(UnmaskingPolicy):
    """Writes every proposal whose confidence reaches tau, and always the most confident one.

    By default confidence is measured at temperature 1, as in LLaDA. Dream measures it on tempered and filtered
    distributions, so its thresholds are not comparable unless `tempered` is set.

    Attributes:
        tau: The threshold on confidence, 0 to 1.
    """

    tau: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("threshold", "tau", self.tau)

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        return view.surest_and(view.confidence >= self.tau), memory
