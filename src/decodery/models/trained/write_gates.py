"""A small network that tells which tokens are worth storing, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, linear

from decodery.core.errors import UnsupportedModel

from ..config import MOST_LAYERS, ModelConfig
from ..loaders.fields import Kind, Whole
from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect

LEVELS = 101


def width(config: ModelConfig) -> int:
    """How many numbers a gate looks at: a row's queries, keys and values before rotation."""
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def margin(tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """[n] how much rather each of [n, width] rows is stored than not.

    Gelu between layers, after a layer norm.
    """
    found = layer_norm(rows, rows.shape[-1:], tensors["scale"], tensors["shift"])
    last = sum(name.startswith("weight.") for name in tensors) - 1
    for number in range(last + 1):
        found = linear(found, tensors[f"weight.{number}"], tensors[f"bias.{number}"])
        found = found if number == last else gelu(found)
    return found[:, 0] - found[:, 1]


@dataclass(frozen=True, eq=False)
class WriteGates(TrainedPart):
    """Small networks that decide which tokens a cache stores.

    Attributes:
        tensors: Of `margin`.
        layer: The first one whose keys and values it decides about, where it looks.
        levels: [101] ascending, the quantiles of margins in texts.
        facts: How it was made.
        model: `fingerprint` of the model it belongs to, "" where any of its shape will do.
    """

    KIND = "write gate"
    FILE = "write-gate.safetensors"
    MADE = "make one with `decodery train kv write-gate -m MODEL FILES --out DIR`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"layer": Whole(0, MOST_LAYERS)}

    tensors: Mapping[str, torch.Tensor]
    layer: int
    levels: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @classmethod
    def initial(cls, config: ModelConfig, layer: int, sizes: tuple[int, ...], seed: int = 0) -> WriteGates:
        """One that nothing was learned for.

        Args:
            sizes: Widths between the layers.
        """
        generator, tensors = torch.Generator().manual_seed(seed), {}
        wide = width(config)
        tensors["scale"], tensors["shift"] = (
            torch.ones(wide, dtype=torch.float32, device="cpu"),
            torch.zeros(wide, dtype=torch.float32, device="cpu"),
        )
        for number, (before, after) in enumerate(pairwise((wide, *sizes, 2))):
            tensors[f"weight.{number}"] = (
                torch.randn(after, before, generator=generator, dtype=torch.float32, device="cpu") / before**0.5
            )
            tensors[f"bias.{number}"] = torch.zeros(after, dtype=torch.float32, device="cpu")
        return cls(tensors, layer, torch.linspace(-1, 1, LEVELS, dtype=torch.float32, device="cpu"))

    def least(self, share: float) -> float:
        """The margin above which that share of tokens lies."""
        return -np.inf if share >= 1 else float(np.interp(1 - share, np.linspace(0, 1, LEVELS), self.levels.numpy()))

    def margins(self, rows: torch.Tensor) -> torch.Tensor:
        """`margin` of rows [n, width], in double precision."""
        tensors = {name: tensor.to(rows.device, torch.float64) for name, tensor in self.tensors.items()}
        return margin(tensors, rows.double())

    def require(self, model: Reader) -> None:
        """Raise UnsupportedModel or SettingsError for a model that it was not made for."""
        if len(self.tensors["scale"]) != width(model.config) or not 0 <= self.layer < model.config.num_layers:
            raise UnsupportedModel(f"this write gate was made for a model of another shape: {self.MADE}")
        self.refuse_other(model)

    def artifact(self) -> Artifact:
        tensors = {**self.tensors, "levels": self.levels}
        return Artifact(self.KIND, tensors, {**self.facts, "layer": self.layer}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> WriteGates:
        tensors = dict(found.tensors)
        levels = tensors.pop("levels")
        expect(_sound(tensors) and tuple(levels.shape) == (LEVELS,) and bool((levels.diff() >= 0).all()))
        return cls(tensors, found.facts["layer"], levels.float(), found.facts, found.model)


def _sound(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether they are layers that follow one another, from a norm's width to 2."""
    count, norm = (len(tensors) - 2) // 2, tensors["scale"]
    names = {"scale", "shift", *(f"{kind}.{number}" for kind in ("weight", "bias") for number in range(count))}
    if count < 1 or set(tensors) != names or norm.ndim != 1 or tensors["shift"].shape != norm.shape:
        return False
    wide = len(norm)
    for number in range(count):
        weight, bias = tensors[f"weight.{number}"], tensors[f"bias.{number}"]
        if weight.ndim != 2 or weight.shape[1] != wide or tuple(bias.shape) != (len(weight),):
            return False
        wide = len(weight)
    return wide == 2 and all(tensor.is_floating_point() for tensor in tensors.values())
