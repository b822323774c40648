"""A router between two models: how likely the larger one would write a better step than the smaller one has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from decodery.core.errors import SettingsError
from decodery.models.config import LAYERS
from decodery.models.loaders.fields import Kind, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect

_NAMES = "weight", "bias", "out", "out_bias"


@dataclass(frozen=True, eq=False)
class RouterHead(TrainedPart):
    """Two layers on the second model's last state of a step and on which model wrote the step before.

    Attributes:
        weight: [inner, hidden + 1], the last column that of the author.
        bias: [inner].
        out: [inner].
        out_bias: []; float32.
        tap: After how many layers of the second model it reads.
        model: `fingerprint` of that, "" where it is not known.
    """

    KIND = "router"
    MADE = "make one with `decodery train router -m MODEL`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"tap": Whole(0, LAYERS.most)}

    weight: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    tap: int
    model: str = ""

    def better(self, states: torch.Tensor, escalated: torch.Tensor) -> torch.Tensor:
        """[n] probabilities that the larger model's step is worth more.

        Args:
            states: [n, hidden].
            escalated: [n] whether the larger one wrote the step before.
        """
        rows = torch.cat([states.to(self.weight), escalated.to(self.weight)[:, None]], dim=1)
        return torch.sigmoid(torch.tanh(rows @ self.weight.T + self.bias) @ self.out + self.out_bias)

    def fits(self, model: Reader) -> None:
        """Raise SettingsError for another second model than the one it was trained for."""
        width, config = self.weight.shape[1] - 1, model.config
        if width != config.hidden_size or not 0 <= self.tap <= config.num_layers:
            raise SettingsError(
                f"this router reads {width} numbers after layer {self.tap}, and the second model has "
                f"{config.hidden_size} in {config.num_layers} layers: train one for it with `decodery train router -m "
                "MODEL`"
            )
        self.refuse_other(model, "train one for it with `decodery train router -m MODEL`")

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, {name: getattr(self, name) for name in _NAMES}, {"tap": self.tap}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> RouterHead:
        weight, bias, out, out_bias = tensors = [found.tensors[name].float() for name in _NAMES]
        expect([each.dim() for each in tensors] == [2, 1, 1, 0] and len(weight) == len(bias) == len(out) > 0)
        return cls(weight, bias, out, out_bias, found.facts["tap"], found.model)
