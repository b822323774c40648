"""Where a model may stop early: what calibration and training found, kept in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from ..config import MOST_LAYERS
from ..loaders.fields import Kind, Number, Text, Whole
from .artifact import Artifact, TrainedPart, expect

EXITS, HEADS = "exits.safetensors", "exit-heads.safetensors"
"""What the files are called in the folders that are made."""
STOP, EXIT, CONTINUE = range(3)
"""The classes of an `ExitHeads`' classifier, in order."""


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
class Exits(TrainedPart):
    """A calibrated threshold, and all that it was calibrated with.

    Attributes:
        threshold, confidence, every, tokens, tau: Settings of the source `calm`.
        tested: [k, 3] float64, the thresholds that were tried in order, their mean loss and the p-value of its being
            too large.
        facts: How it was made, as plain JSON.
        model: `fingerprint` of the model it belongs to, "" where that is not known.
        classifier: [hidden + 1] float32, see `agreeing`, where that is the confidence.
    """

    KIND = "calibration of early exits"
    FILE = EXITS
    MADE = "make one with decodery train calm -m MODEL"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "threshold": Number(0.0, 1e3),
        "confidence": Text(32),
        "every": Whole(1, 1 << 12),
        "tokens": Whole(1, 1 << 24),
        "tau": Number(0.0, 1e3),
    }

    threshold: float
    confidence: str
    every: int
    tokens: int
    tau: float
    tested: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    classifier: torch.Tensor | None = None

    def artifact(self) -> Artifact:
        own = {name: getattr(self, name) for name in self.FACTS}
        tensors = {"tested": self.tested.double()}
        if self.classifier is not None:
            tensors["classifier"] = self.classifier.float()
        return Artifact(self.KIND, tensors, {**self.facts, **own}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Exits:
        tested, classifier = found.tensors["tested"], found.tensors.get("classifier")
        expect(tested.ndim == 2 and tested.shape[1] == 3)
        expect(classifier is None or (classifier.ndim == 1 and classifier.is_floating_point()))
        expect(classifier is not None or found.facts["confidence"] != "classifier")
        own = {name: found.facts[name] for name in cls.FACTS}
        return cls(**own, tested=tested, facts=found.facts, model=found.model, classifier=classifier)


@dataclass(frozen=True, eq=False)
class ExitHeads(TrainedPart):
    """What `sec` learned: a correction of the head for every check, and what says who leaves.

    Attributes:
        every: A check stands after so many layers, again and again, none after the last one.
        classifier: [3, hidden] float32, of `STOP`, `EXIT` and `CONTINUE`, over unit states.
        down, up: [checks, rank, hidden] and [checks, hidden, rank] float32: what the vocabulary projection reads at
            check k is `x + up[k] down[k] x`, x the state there after the final norm.
        facts, model: As in `Exits`.
    """

    KIND = "heads of early exits"
    FILE = HEADS
    MADE = "make some with decodery train sec -m MODEL"
    FACTS: ClassVar[Mapping[str, Kind]] = {"every": Whole(1, MOST_LAYERS)}

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

    def artifact(self) -> Artifact:
        tensors = {"classifier": self.classifier.float(), "down": self.down.float(), "up": self.up.float()}
        return Artifact(self.KIND, tensors, {**self.facts, "every": self.every}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> ExitHeads:
        classifier, down, up = parts = [found.tensors[name] for name in ("classifier", "down", "up")]
        checks, rank, hidden = down.shape
        expect(classifier.shape == (3, hidden) and up.shape == (checks, hidden, rank))
        expect(all(part.dtype == torch.float32 for part in parts))
        return cls(found.facts["every"], classifier, down, up, found.facts, found.model)
