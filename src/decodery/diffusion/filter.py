"""A filter for learn2pd: by how sure the places of a block are, which proposals are what will be written in the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, refuse_other, remembered

MADE = "train one with `decodery train learn2pd -m MODEL`"
_KIND = "filter of proposals"
_NAMES = ("weight", "bias", "out", "out_bias")
MOST_PLACES = 1 << 12


@dataclass(frozen=True, eq=False)
class Filter:
    """Two layers on the confidences of a block of b places.

    Attributes:
        weight: [inner, b].
        bias: [inner].
        out: [b, inner].
        out_bias: [b]; float32.
        model: `fingerprint` of the model whose confidences it learned from, "" where it is not known.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    model: str = ""

    @property
    def places(self) -> int:
        return self.weight.shape[1]

    def logits(self, confidence: torch.Tensor) -> torch.Tensor:
        """[n, b] of the odds that a proposal stays.

        Args:
            confidence: [n, b], from 0 to 1, 1 where something is written.
        """
        return torch.relu(confidence @ self.weight.T + self.bias) @ self.out.T + self.out_bias

    def fits(self, model: Reader) -> None:
        """Raise SettingsError for another model than the one it was trained for."""
        refuse_other("this filter", self.model, model, MADE)

    def save(self, path: Path, **facts: object) -> None:
        """Write the filter as a safetensors file, whole or not at all.

        Args:
            facts: How it was made.
        """
        Artifact(_KIND, {name: getattr(self, name) for name in _NAMES}, facts, self.model).save(path)

    @classmethod
    def untrained(cls, places: int, seed: int = 0, model: str = "") -> Filter:
        """As many inner units as places, random as the seed says."""
        if not 1 <= places <= MOST_PLACES:
            raise SettingsError(f"a filter reads blocks of 1 to {MOST_PLACES} places, not {places}")
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
    def load(cls, path: str | Path) -> Filter:
        """Read what `save` wrote.

        Raises:
            ModelNotFound, CorruptFile: For anything else.
        """
        return _load(path)


@remembered
def _load(path: Path) -> Filter:
    found = Artifact.read(path, _KIND, MADE)
    weight, bias, out, out_bias = (
        found.tensors.get(name, torch.empty(0, dtype=torch.float32, device="cpu")).float() for name in _NAMES
    )
    shapes = [tuple(each.shape) for each in (weight, bias, out, out_bias)]
    if weight.dim() != 2 or not weight.numel() or weight.shape[1] > MOST_PLACES:
        raise CorruptFile(f"{path} holds no filter: {MADE}")
    inner, places = weight.shape
    if shapes[1:] != [(inner,), (places, inner), (places,)]:
        raise CorruptFile(f"{path} holds no filter, its layers do not fit together: {MADE}")
    return Filter(weight, bias, out, out_bias, found.model)
