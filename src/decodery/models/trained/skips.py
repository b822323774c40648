"""Which sublayers a model can do without when it drafts for itself, kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import CorruptFile

from ..config import LAYERS
from ..layer_plan import SUBLAYERS
from .artifact import Artifact

_KIND = "set of skipped sublayers"
_MADE = "make one with decodery train swift -m MODEL"


def switches(layers: int) -> list[str]:
    """The sublayers of a model of so many layers that may be skipped, not of the first and last layer."""
    return [f"{kind}.{layer}" for kind in SUBLAYERS for layer in range(1, layers - 1)]


def sublayers(chosen: np.ndarray, layers: int) -> frozenset[str]:
    """The names of the switches marked in `chosen` [switches] bool."""
    return frozenset(name for name, each in zip(switches(layers), chosen.tolist(), strict=True) if each)


@dataclass(frozen=True, eq=False)
class SkipSet:
    """Sublayers that are passed by, such as "attention.3" or "mlp.5", of a model of `layers` layers.

    Attributes:
        facts: How they were found, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where that is not known.
    """

    skip: frozenset[str]
    layers: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        marks = torch.zeros(len(SUBLAYERS), self.layers, dtype=torch.uint8, device="cpu")
        for name in self.skip:
            kind, _, layer = name.partition(".")
            marks[SUBLAYERS.index(kind), int(layer)] = 1
        Artifact(_KIND, {"skipped": marks}, {**self.facts, "layers": self.layers}, self.model).save(path)

    @classmethod
    def load(cls, path: Path) -> SkipSet:
        """Read what `save` wrote.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: For anything else.
        """
        found = Artifact.read(path, _KIND, _MADE, {"layers": LAYERS})
        marks, layers = found.tensors.get("skipped"), found.facts["layers"]
        if marks is None or marks.dtype != torch.uint8 or marks.shape != (len(SUBLAYERS), layers) or marks.max() > 1:
            raise CorruptFile(f"{path} holds no {_KIND}, or is damaged: {_MADE}")
        skip = {f"{SUBLAYERS[kind]}.{layer}" for kind, layer in marks.nonzero().tolist()}
        return cls(frozenset(skip), layers, found.facts, found.model)
