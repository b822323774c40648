"""Which sublayers a model can do without when it drafts for itself, kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from ..config import LAYERS
from ..layer_plan import SUBLAYERS
from ..loaders.fields import Kind
from .artifact import Artifact, TrainedPart, expect


def switches(layers: int) -> list[str]:
    """The sublayers of a model of so many layers that may be skipped, not of the first and last layer."""
    return [f"{kind}.{layer}" for kind in SUBLAYERS for layer in range(1, layers - 1)]


def sublayers(chosen: np.ndarray, layers: int) -> frozenset[str]:
    """The names of the switches marked in `chosen` [switches] bool."""
    return frozenset(name for name, each in zip(switches(layers), chosen.tolist(), strict=True) if each)


@dataclass(frozen=True, eq=False)
class SkipSet(TrainedPart):
    """Sublayers that are passed by, such as "attention.3" or "mlp.5", of a model of `layers` layers.

    Attributes:
        facts: How they were found, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where that is not known.
    """

    KIND = "set of skipped sublayers"
    FILE = "skips.safetensors"
    MADE = "make one with decodery train swift -m MODEL"
    FACTS: ClassVar[Mapping[str, Kind]] = {"layers": LAYERS}

    skip: frozenset[str]
    layers: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def artifact(self) -> Artifact:
        marks = torch.zeros(len(SUBLAYERS), self.layers, dtype=torch.uint8, device="cpu")
        for name in self.skip:
            kind, _, layer = name.partition(".")
            marks[SUBLAYERS.index(kind), int(layer)] = 1
        return Artifact(self.KIND, {"skipped": marks}, {**self.facts, "layers": self.layers}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> SkipSet:
        marks, layers = found.tensors["skipped"], found.facts["layers"]
        expect(marks.dtype == torch.uint8 and marks.shape == (len(SUBLAYERS), layers) and int(marks.max()) <= 1)
        skip = {f"{SUBLAYERS[kind]}.{layer}" for kind, layer in marks.nonzero().tolist()}
        return cls(frozenset(skip), layers, found.facts, found.model)
