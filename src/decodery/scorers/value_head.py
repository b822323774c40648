"""Value heads: how good a text will become, read off the hidden state of its last token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.config import LAYERS
from decodery.models.loaders.fields import Kind, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect
from decodery.step.scorer import Candidates, Scorer

__all__ = ["LinearValue"]


@dataclass(frozen=True, eq=False)
class LinearValue(TrainedPart):
    """A linear head on a hidden state: weight [hidden] and bias [], float32.

    Attributes:
        tap: After how many layers it reads.
        model: `fingerprint` of the model it reads, "" where that is not known.
    """

    KIND = "value head"
    MADE = "make one with `decodery train value -m MODEL`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"tap": Whole(0, LAYERS.most)}

    weight: torch.Tensor
    bias: torch.Tensor
    tap: int
    model: str = ""

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, {"weight": self.weight, "bias": self.bias}, {"tap": self.tap}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> LinearValue:
        weight, bias = (found.tensors[name] for name in ("weight", "bias"))
        expect((weight.dim(), bias.dim()) == (1, 0))
        return cls(weight.float(), bias.float(), found.facts["tap"], found.model)


@register(
    "value-head",
    paper="Controlled Decoding from Language Models (2023)",
    guarantee="as good as its training",
    requirements=("a head made by decodery train value",),
)
@dataclass(frozen=True)
class ValueHead(Scorer):
    """Scores beginnings and answers by a trained head on the model's hidden state at their last token.

    A file is read once, so that requests that name it share their passes.

    Attributes:
        head: A file made by `decodery train value`, or a `LinearValue`.
    """

    head: LinearValue | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", LinearValue.load(self.head))

    @property
    def trained(self) -> LinearValue:
        assert isinstance(self.head, LinearValue)
        return self.head

    @property
    def requirements(self) -> Requirements:
        return Requirements(rows=True, taps=(self.trained.tap,))

    def fits(self, model: Reader) -> None:
        head, config = self.trained, model.config
        if len(head.weight) != config.hidden_size or not 0 <= head.tap <= config.num_layers:
            raise SettingsError(
                f"this value head reads {len(head.weight)} numbers after layer {head.tap}, and the model has "
                f"{config.hidden_size} in {config.num_layers} layers: use one that was trained for this model"
            )
        head.refuse_other(model, "train one for it with `decodery train value -m MODEL`")

    @property
    def blocks(self) -> bool:
        """See `Scorer.blocks`: a product of a row and a vector does not."""
        return False

    def score(self, candidates: Candidates) -> torch.Tensor:
        head = self.trained
        return candidates.hidden[head.tap].to(head.weight) @ head.weight + head.bias
