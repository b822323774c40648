"""How much each key-value head needs old tokens, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from decodery.core.errors import UnsupportedModel

from ..config import ModelConfig
from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect


@dataclass(frozen=True, eq=False)
class HeadGates(TrainedPart):
    """By layer and head: how much a head needs old tokens.

    Attributes:
        gates: [layers, kv_heads] float32, 0 where a head can do without old tokens and 1 where it needs them all.
        facts: How they were made.
        model: `fingerprint` of the model they belong to, "" where any of its shape will do.
    """

    KIND = "set of head gates"
    FILE = "head-gates.safetensors"
    MADE = "make one with `decodery train kv lserve -m MODEL FILES --out DIR`"

    gates: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def lowest(self, share: float) -> np.ndarray:
        """[layers, kv_heads] bool: this share of the heads, rounded, those with the lowest gates.

        Of equal ones the first.
        """
        flat = self.gates.flatten().double().numpy()
        found = np.zeros(flat.shape, dtype=bool)
        found[np.argsort(flat, kind="stable")[: round(share * len(flat))]] = True
        return found.reshape(tuple(self.gates.shape))

    def require(self, model: Reader) -> None:
        """Raise UnsupportedModel or SettingsError for a model that they were not made for."""
        config: ModelConfig = model.config
        if tuple(self.gates.shape) != (config.num_layers, config.num_kv_heads):
            raise UnsupportedModel(f"these head gates were made for a model of another shape: {self.MADE}")
        self.refuse_other(model)

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, {"gates": self.gates.float()}, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> HeadGates:
        gates = found.tensors["gates"]
        expect(gates.ndim == 2 and gates.is_floating_point() and bool(((gates >= 0) & (gates <= 1)).all()))
        return cls(gates, found.facts, found.model)
