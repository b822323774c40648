"""How much each key-value head needs old tokens, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import ModelConfig
from ..protocol import Reader
from .artifact import Artifact, refuse_other, remembered

GATES = "head-gates.safetensors"
_KIND = "set of head gates"
_MADE = "make one with `decodery train kv lserve -m MODEL FILES --out DIR`"


@dataclass(frozen=True, eq=False)
class HeadGates:
    """By layer and head: how much a head needs old tokens.

    Attributes:
        gates: [layers, kv_heads] float32, 0 where a head can do without old tokens and 1 where it needs them all.
        facts: How they were made.
        model: `fingerprint` of the model they belong to, "" where any of its shape will do.
    """

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
            raise UnsupportedModel(f"these head gates were made for a model of another shape: {_MADE}")
        refuse_other("this set of head gates", self.model, model, _MADE)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        Artifact(_KIND, {"gates": self.gates.float()}, self.facts, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path) -> HeadGates:
        """Read what `save` wrote, a file or the folder it is in. Raises ModelNotFound, or CorruptFile."""
        at = Path(path).expanduser()
        return _load(at / GATES if at.is_dir() else at)


@remembered
def _load(path: Path) -> HeadGates:
    read = Artifact.read(path, _KIND, _MADE)
    gates = read.tensors.get("gates")
    if gates is None or gates.ndim != 2 or not gates.is_floating_point() or not ((gates >= 0) & (gates <= 1)).all():
        raise CorruptFile(f"{path} holds something else than head gates: {_MADE}")
    return HeadGates(gates, read.facts, read.model)
