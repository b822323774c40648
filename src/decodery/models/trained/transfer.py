"""Maps that make the hidden state of a token into one of a token after it, as a draft of what is not written yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from decodery.core.errors import SettingsError

from ..loaders.drafts import TRANSFER
from ..native.int8 import Int8Linear
from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect
from .placeholders import are_rates


@dataclass(frozen=True, eq=False)
class Transfer(TrainedPart):
    """Map i predicts, after `layers`[i] layers, the state of the (i + 1)-th token after this one.

    Attributes:
        maps: [n, hidden, hidden] float32, to be multiplied from the left.
        layers: Ascending.
        rates: [n, ranks] float32, how often each of the most likely tokens there was right in held-out texts.
        facts: How they were made, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where that does not matter.
    """

    KIND = "hidden transfer"
    FILE = TRANSFER
    MADE = "make one with decodery train hidden-transfer -m MODEL"

    maps: torch.Tensor
    layers: tuple[int, ...]
    rates: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def rounded(self) -> Transfer:
        """With maps as a file keeps them: in int8, with a scale per output."""
        kept = [Int8Linear.quantize(each) for each in self.maps]
        maps = torch.stack([each.weight.float() * each.scale[:, None] for each in kept])
        return Transfer(maps, self.layers, self.rates, self.facts, self.model)

    def artifact(self) -> Artifact:
        """Maps are kept in int8."""
        kept = [Int8Linear.quantize(each) for each in self.maps]
        tensors = {
            "weight": torch.stack([each.weight for each in kept]),
            "scale": torch.stack([each.scale for each in kept]),
            "layers": torch.tensor(self.layers, dtype=torch.int64, device="cpu"),
            "rates": self.rates.float(),
        }
        return Artifact(self.KIND, tensors, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Transfer:
        weight, scale, layers, rates = (found.tensors[name] for name in ("weight", "scale", "layers", "rates"))
        count, wide, _ = weight.shape
        ascending = (0, *layers.tolist()) == tuple(sorted((0, *layers.tolist())))
        expect(weight.dtype == torch.int8 and weight.shape == (count, wide, wide) and are_rates(rates, count))
        expect(count > 0 and ascending and scale.dtype == torch.float32 and scale.shape == (count, wide))
        expect(layers.dtype == torch.int64 and layers.shape == (count,))
        maps = weight.float() * scale[:, :, None]
        return cls(maps, tuple(layers.tolist()), rates, found.facts, found.model)

    def check(self, model: Reader) -> None:
        """Raise SettingsError where it was made for another model."""
        advice = f"{self.MADE}, for this one"
        self.refuse_other(model, advice)
        if self.maps.shape[1] != model.config.hidden_size or self.layers[-1] > model.config.num_layers:
            raise SettingsError(f"this hidden transfer was made for a model of another shape: {advice}")
