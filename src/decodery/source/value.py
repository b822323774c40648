"""What steers a source: values of prefixes and rewards of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import CorruptFile, SettingsError
from ..model.config import ModelConfig
from ..model.store import replacing, written


def fitted(value: Value | str, config: ModelConfig) -> Value:
    """`value`, or the `LinearValue` in the file of that name, checked against the model whose states it is to read.

    A file is read once, so that requests that name it are scored together. Raises CorruptFile for a file that holds no
    value head, SettingsError where it was made for another model.
    """
    found = _load(value, written(value)) if isinstance(value, str) else value
    size = len(found.weight) if isinstance(found, LinearValue) else config.hidden_size
    if size != config.hidden_size or any(not 0 <= tap <= config.num_layers for tap in found.taps):
        raise SettingsError(
            f"this value head reads {size} numbers after layer {max(found.taps)}, and the model has "
            f"{config.hidden_size} in {config.num_layers} layers: use one that was trained for this model"
        )
    return found


class Value(Protocol):
    """How good a text will become, judged by its beginning.

    taps: after how many layers it wants the hidden states of the prefix's last token; empty for one that looks at the
    tokens alone.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    def __call__(self, prefixes: Sequence[Sequence[int]], hidden: dict[int, torch.Tensor]) -> torch.Tensor:
        """[m] values of m prefixes, prompt included; hidden: {tap: [m, hidden]}."""
        ...


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
class LinearValue:
    """A linear head on a hidden state: weight [hidden] and bias [], float32. tap: after how many layers it reads."""

    weight: torch.Tensor
    bias: torch.Tensor
    tap: int

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def __call__(self, prefixes: Sequence[Sequence[int]], hidden: dict[int, torch.Tensor]) -> torch.Tensor:
        return hidden[self.tap].to(self.weight) @ self.weight + self.bias

    def save(self, path: Path) -> None:
        """Write the head as a safetensors file, whole or not at all."""
        with replacing(path) as temporary:
            save_file({"weight": self.weight, "bias": self.bias, "tap": torch.tensor(self.tap)}, temporary)

    @classmethod
    def load(cls, path: str | Path) -> LinearValue:
        """Read what `save` wrote. Raises CorruptFile for anything else."""
        try:
            kept = load_file(Path(path).expanduser())
            value = cls(kept["weight"].float(), kept["bias"].float(), int(kept["tap"]))
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            raise CorruptFile(f"{path} holds no value head: make one with `decodery train value`") from error
        if value.weight.dim() != 1 or value.bias.dim() != 0:
            raise CorruptFile(f"{path} holds no value head: its weight must be a vector and its bias a number")
        if not (value.weight.isfinite().all() and value.bias.isfinite()):
            raise CorruptFile(f"{path} holds numbers that are not finite: train the value head again")
        return value


@lru_cache(maxsize=4)
def _load(path: str, written: int) -> LinearValue:
    return LinearValue.load(path)
