"""The trained filter of learn2pd: it predicts from the confidences of a block which proposals are final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect, refuse_other

_NAMES = ("weight", "bias", "out", "out_bias")
MOST_PLACES = 1 << 12


@dataclass(frozen=True, eq=False)
class Filter(TrainedPart):
    """Two layers on the confidences of a block of b positions.

    Attributes:
        weight: [inner, b].
        bias: [inner].
        out: [b, inner].
        out_bias: [b]; float32.
        model: `fingerprint` of the model that gave the training confidences, "" where it is unknown.
    """

    KIND = "filter of proposals"
    MADE = "train one with `decodery train learn2pd -m MODEL`"

    weight: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    model: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def places(self) -> int:
        return self.weight.shape[1]

    def logits(self, confidence: torch.Tensor) -> torch.Tensor:
        """[n, b] log-odds that a proposal is final.

        Args:
            confidence: [n, b], from 0 to 1; 1 at written positions.
        """
        return torch.relu(confidence @ self.weight.T + self.bias) @ self.out.T + self.out_bias

    def fits(self, model: Reader) -> None:
        """Raise SettingsError for another model than the one it was trained for."""
        refuse_other("this filter", self.model, model, self.MADE)

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, {name: getattr(self, name) for name in _NAMES}, self.facts, self.model)

    @classmethod
    def untrained(cls, places: int, seed: int = 0, model: str = "") -> Filter:
        """A filter with random weights and as many inner units as positions."""
        if not 1 <= places <= MOST_PLACES:
            raise SettingsError(f"a filter reads blocks of 1 to {MOST_PLACES} positions, not {places}")
        draws = torch.Generator().manual_seed(seed)
        first, second = (
            torch.randn(places, places, generator=draws, dtype=torch.float32, device="cpu") / places**0.5
            for _ in range(2)
        )
        return cls(
            first,
            torch.zeros(places, dtype=torch.float32, device="cpu"),
            second,
            torch.zeros(places, dtype=torch.float32, device="cpu"),
            model,
        )

    @classmethod
    def from_artifact(cls, found: Artifact) -> Filter:
        weight, bias, out, out_bias = parts = [found.tensors[name].float() for name in _NAMES]
        inner, places = weight.shape
        expect(inner > 0 and 0 < places <= MOST_PLACES)
        expect([tuple(each.shape) for each in parts[1:]] == [(inner,), (places, inner), (places,)])
        return cls(weight, bias, out, out_bias, found.model, found.facts)
