"""Where a model may stop early: what calibration and training found, kept in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import CorruptFile

from ..config import MOST_LAYERS
from ..loaders.fields import Number, Text, Whole
from .artifact import Artifact

EXITS, HEADS = "exits.safetensors", "exit-heads.safetensors"
"""What the files are called in the folders that are made."""
STOP, EXIT, CONTINUE = range(3)
"""The classes of an `ExitHeads`' classifier, in order."""

_EXITS, _MAKE_EXITS = "calibration of early exits", "make one with decodery train calm -m MODEL"
_HEADS, _MAKE_HEADS = "heads of early exits", "make some with decodery train sec -m MODEL"
_FACTS = {
    "threshold": Number(0.0, 1e3),
    "confidence": Text(32),
    "every": Whole(1, 1 << 12),
    "tokens": Whole(1, 1 << 24),
    "tau": Number(0.0, 1e3),
}


def unit(states: torch.Tensor) -> torch.Tensor:
    """[n, hidden] float64: states scaled to a mean square of 1, as classifiers read them."""
    return torch.nn.functional.rms_norm(states.double(), states.shape[-1:], eps=1e-12)


def agreeing(states: torch.Tensor, classifier: torch.Tensor) -> torch.Tensor:
    """[n] probability that the last layer has the same most likely token, from earlier states.

    Args:
        classifier: [hidden + 1], the weights of a logistic regression and its bias.
    """
    weights = classifier.to(states.device, torch.float64)
    return (unit(states) @ weights[:-1] + weights[-1]).sigmoid()


@dataclass(frozen=True, eq=False)
class Exits:
    """A calibrated threshold, and all that it was calibrated with.

    Attributes:
        threshold, confidence, every, tokens, tau: Settings of the source `calm`.
        tested: [k, 3] float64, the thresholds that were tried in order, their mean loss and the p-value of its being
            too large.
        facts: How it was made, as plain JSON.
        model: `fingerprint` of the model it belongs to, "" where that is not known.
        classifier: [hidden + 1] float32, see `agreeing`, where that is the confidence.
    """

    threshold: float
    confidence: str
    every: int
    tokens: int
    tau: float
    tested: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    classifier: torch.Tensor | None = None

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        own = {name: getattr(self, name) for name in _FACTS}
        tensors = {"tested": self.tested.double()}
        if self.classifier is not None:
            tensors["classifier"] = self.classifier.float()
        Artifact(_EXITS, tensors, {**self.facts, **own}, self.model).save(path)

    @classmethod
    def load(cls, path: Path) -> Exits:
        """Read what `save` wrote.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: For anything else.
        """
        found = Artifact.read(path, _EXITS, _MAKE_EXITS, _FACTS)
        tested, classifier = found.tensors.get("tested"), found.tensors.get("classifier")
        sound = tested is not None and tested.ndim == 2 and tested.shape[1] == 3
        sound = sound and (classifier is None or (classifier.ndim == 1 and classifier.is_floating_point()))
        if not sound or (classifier is None and found.facts["confidence"] == "classifier"):
            raise CorruptFile(f"{path} holds no {_EXITS}, or is damaged: {_MAKE_EXITS}")
        own = {name: found.facts[name] for name in _FACTS}
        assert tested is not None
        return cls(**own, tested=tested, facts=found.facts, model=found.model, classifier=classifier)


@dataclass(frozen=True, eq=False)
class ExitHeads:
    """What `sec` learned: a correction of the head for every check, and what says who leaves.

    Attributes:
        every: A check stands after so many layers, again and again, none after the last one.
        classifier: [3, hidden] float32, of `STOP`, `EXIT` and `CONTINUE`, over unit states.
        down, up: [checks, rank, hidden] and [checks, hidden, rank] float32: what the vocabulary projection reads at
            check k is `x + up[k] down[k] x`, x the state there after the final norm.
        facts, model: As in `Exits`.
    """

    every: int
    classifier: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def fits(self, layers: int, hidden: int) -> bool:
        """Whether a model of this shape has these checks and states."""
        return len(self.down) == (layers - 1) // self.every and self.classifier.shape[1] == hidden

    def classes(self, states: torch.Tensor) -> torch.Tensor:
        """[n, 3] float64: the probabilities of the classes, by states [n, hidden] after any check's layer."""
        return (unit(states) @ self.classifier.to(states.device, torch.float64).T).softmax(dim=-1)

    def corrected(self, normed: torch.Tensor, checks: np.ndarray) -> torch.Tensor:
        """Rows [n, hidden] after the final norm, as the head is to read those of check `checks` [n].

        -1: as they are. In float64, so that a row's logits do not depend on the rows beside it.
        """
        rows = np.flatnonzero(checks >= 0)
        made, at = normed.clone(), torch.from_numpy(checks[rows]).to(self.down.device)
        x = normed[rows].double()
        narrow = torch.einsum("nrh,nh->nr", self.down[at].to(x.device, x.dtype), x)
        made[rows] = (x + torch.einsum("nhr,nr->nh", self.up[at].to(x.device, x.dtype), narrow)).to(made.dtype)
        return made

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {"classifier": self.classifier.float(), "down": self.down.float(), "up": self.up.float()}
        Artifact(_HEADS, tensors, {**self.facts, "every": self.every}, self.model).save(path)

    @classmethod
    def load(cls, path: Path) -> ExitHeads:
        """Read what `save` wrote.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: For anything else.
        """
        found = Artifact.read(path, _HEADS, _MAKE_HEADS, {"every": Whole(1, MOST_LAYERS)})
        classifier, down, up = (
            found.tensors.get(name, torch.zeros(0, dtype=torch.float32, device="cpu"))
            for name in ("classifier", "down", "up")
        )
        if not _sound(classifier, down, up):
            raise CorruptFile(f"{path} holds no {_HEADS}, or is damaged: {_MAKE_HEADS}")
        return cls(found.facts["every"], classifier, down, up, found.facts, found.model)


def _sound(classifier: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether a classifier and corrections have shapes that go together."""
    if any(part.dtype != torch.float32 for part in (classifier, down, up)) or (classifier.ndim, down.ndim) != (2, 3):
        return False
    checks, rank, hidden = down.shape
    return classifier.shape == (3, hidden) and up.shape == (checks, hidden, rank)
