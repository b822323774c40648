"""LocalLeap: the confidence threshold is lower near confident proposals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import UnmaskingPolicy, require_share
from .view import Commit, View


@register(
    "local-leap",
    paper="Accelerating Diffusion LLM Inference via Local Determinism Propagation (2025)",
    guarantee="as threshold, with a lower threshold near tokens that are certain",
)
@dataclass(frozen=True)
class LocalLeap(UnmaskingPolicy):
    """Writes proposals more confident than `anchor`, and near them those more confident than `relaxed`.

    Only open positions count as anchors, as in the released code. With relaxed = anchor it is threshold.

    Attributes:
        anchor: Confidence from which a position is written and is an anchor.
        relaxed: Confidence from which a position near an anchor is written.
        radius: Positions that are near.
    """

    anchor: float = 0.9
    relaxed: float = 0.75
    radius: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("local-leap", "anchor", self.anchor)
        require_share("local-leap", "relaxed", self.relaxed)
        if self.radius < 0:
            raise SettingsError(f"local-leap: radius must be 0 or more positions on either side, not {self.radius}")

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        anchors = view.confidence >= self.anchor
        places = view.positions[anchors]
        # The nearest anchor on either side.
        after = np.searchsorted(places, view.positions)
        ends = np.concatenate(([-np.inf], places, [np.inf]))
        distance = np.minimum(view.positions - ends[after], ends[after + 1] - view.positions)
        near = (distance <= self.radius) & (view.confidence >= self.relaxed)
        return view.surest_and(anchors | near), memory
