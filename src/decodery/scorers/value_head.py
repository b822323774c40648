"""Value heads: how good a text will become, read off the hidden state of its last token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.config import LAYERS
from decodery.models.loaders.fields import Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, refuse_other, remembered
from decodery.step.scorer import Candidates, Scorer

_MADE = "make one with `decodery train value -m MODEL`"

__all__ = ["LinearValue"]


@dataclass(frozen=True, eq=False)
class LinearValue:
    """A linear head on a hidden state: weight [hidden] and bias [], float32.

    Attributes:
        tap: After how many layers it reads.
        model: `fingerprint` of the model it reads, "" where that is not known.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    tap: int
    model: str = ""

    def save(self, path: Path) -> None:
        """Write the head as a safetensors file, whole or not at all."""
        Artifact("value head", {"weight": self.weight, "bias": self.bias}, {"tap": self.tap}, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path) -> LinearValue:
        """Read what `save` wrote.

        Raises:
            ModelNotFound, CorruptFile: For anything else.
        """
        return _load(path)


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
        if isinstance(self.head, str):
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
        refuse_other("this value head", head.model, model, "train one for it with `decodery train value -m MODEL`")

    @property
    def blocks(self) -> bool:
        """See `Scorer.blocks`: a product of a row and a vector does not."""
        return False

    def score(self, candidates: Candidates) -> torch.Tensor:
        head = self.trained
        return candidates.hidden[head.tap].to(head.weight) @ head.weight + head.bias


@remembered
def _load(path: Path) -> LinearValue:
    found = Artifact.read(path, "value head", _MADE, {"tap": Whole(0, LAYERS.most)})
    weight, bias = (found.tensors.get(name) for name in ("weight", "bias"))
    if weight is None or bias is None or weight.dim() != 1 or bias.dim() != 0:
        raise CorruptFile(f"{path} holds no value head: its weight must be a vector and its bias a number")
    return LinearValue(weight.float(), bias.float(), found.facts["tap"], found.model)
