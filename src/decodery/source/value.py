"""What steers a source: values of prefixes and rewards of texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..contract import Contract
from ..errors import CorruptFile, SettingsError
from ..model.artifact import Artifact, refuse_other, remembered
from ..model.config import LAYERS
from ..model.fields import Whole
from ..model.protocol import Reader

_MADE = "make one with `decodery train value`"

__all__ = ["LinearValue", "Reward", "TextReward", "Value"]


def fitted(value: Value | str, model: Reader) -> Value:
    """`value`, or the `LinearValue` in the file of that name, checked against the model whose states it is to read.

    A file is read once, so that requests that name it are scored together. Raises CorruptFile for a file that holds no
    value head, SettingsError where it was made for another model.
    """
    found = _load(value) if isinstance(value, str) else value
    config = model.config
    size = len(found.weight) if isinstance(found, LinearValue) else config.hidden_size
    if size != config.hidden_size or any(not 0 <= tap <= config.num_layers for tap in found.taps):
        raise SettingsError(
            f"this value head reads {size} numbers after layer {max(found.taps)}, and the model has "
            f"{config.hidden_size} in {config.num_layers} layers: use one that was trained for this model"
        )
    if isinstance(found, LinearValue):
        refuse_other("this value head", found.model, model, "train one for it with `decodery train value`")
    return found


class Value(Contract):
    """How good a text will become, judged by its beginning.

    taps: after how many layers it wants the hidden states of the prefix's last token; empty for one that looks at the
    tokens alone.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @abstractmethod
    def __call__(self, prefixes: Sequence[Sequence[int]], hidden: dict[int, torch.Tensor]) -> torch.Tensor:
        """[m] values of m prefixes, prompt included; hidden: {tap: [m, hidden]}."""


class Reward(Protocol):
    """How good finished texts are."""

    def __call__(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> Sequence[float]:
        """One number per output; outputs: token ids behind the prompt's."""
        ...


@dataclass(frozen=True)
class TextReward:
    """A reward that reads text: the outputs are decoded for it. decode: ids to text; score: text to number."""

    decode: Callable[[list[int]], str]
    score: Callable[[str], float]

    def __call__(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[float]:
        return [self.score(self.decode(list(output))) for output in outputs]


@dataclass(frozen=True, eq=False)
class LinearValue(Value):
    """A linear head on a hidden state: weight [hidden] and bias [], float32. tap: after how many layers it reads.

    model: `fingerprint` of the model it reads, "" where that is not known.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    tap: int
    model: str = ""

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def __call__(self, prefixes: Sequence[Sequence[int]], hidden: dict[int, torch.Tensor]) -> torch.Tensor:
        return hidden[self.tap].to(self.weight) @ self.weight + self.bias

    def save(self, path: Path) -> None:
        """Write the head as a safetensors file, whole or not at all."""
        Artifact("value head", {"weight": self.weight, "bias": self.bias}, {"tap": self.tap}, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path) -> LinearValue:
        """Read what `save` wrote. Raises ModelNotFound, or CorruptFile for anything else."""
        return _load(path)


@remembered
def _load(path: Path) -> LinearValue:
    found = Artifact.read(path, "value head", _MADE, {"tap": Whole(0, LAYERS.most)})
    weight, bias = (found.tensors.get(name) for name in ("weight", "bias"))
    if weight is None or bias is None or weight.dim() != 1 or bias.dim() != 0:
        raise CorruptFile(f"{path} holds no value head: its weight must be a vector and its bias a number")
    return LinearValue(weight.float(), bias.float(), found.facts["tap"], found.model)
