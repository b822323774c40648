"""Where a model may stop early, as calibration found it, kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptFile
from .artifact import Artifact
from .fields import Number, Text, Whole

_KIND = "calibration of early exits"
_MADE = "make one with decodery train calm"
_FACTS = {
    "threshold": Number(0.0, 1e3),
    "confidence": Text(32),
    "every": Whole(1, 1 << 12),
    "tokens": Whole(1, 1 << 24),
    "tau": Number(0.0, 1e3),
}


@dataclass(frozen=True, eq=False)
class Exits:
    """A calibrated threshold, and all that it was calibrated with.

    threshold, confidence, every, tokens, tau: settings of the source `calm`. tested: [k, 3] float64, the thresholds
    that were tried in order, their mean loss and the p-value of its being too large. facts: how it was made, as plain
    JSON. model: `fingerprint` of the model it belongs to, "" where that is not known.
    """

    threshold: float
    confidence: str
    every: int
    tokens: int
    tau: float
    tested: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        own = {name: getattr(self, name) for name in _FACTS}
        Artifact(_KIND, {"tested": self.tested.double()}, {**self.facts, **own}, self.model).save(path)

    @classmethod
    def load(cls, path: Path) -> Exits:
        """Read what `save` wrote. Raises ModelNotFound where there is no such file, CorruptFile for anything else."""
        found = Artifact.read(path, _KIND, _MADE, _FACTS)
        tested = found.tensors.get("tested")
        if tested is None or tested.ndim != 2 or tested.shape[1] != 3:
            raise CorruptFile(f"{path} holds no {_KIND}, or is damaged: {_MADE}")
        return cls(**{name: found.facts[name] for name in _FACTS}, tested=tested, facts=found.facts, model=found.model)
