"""What makes one embedding of several tokens' embeddings, as an artifact: a small network over their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import gelu, linear

from decodery.core.errors import SettingsError

from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect
from .coprocessors import level


@dataclass(frozen=True, eq=False)
class MergeNet(TrainedPart):
    """A small network that makes the embedding of a merged token.

    Attributes:
        tensors: "first" [width, 3 * hidden], "bias" [width] and "second" [hidden, width], of a gated sum.
        facts: How it was made.
        model: `fingerprint` of the model it belongs to, "" where any of its width will do.
    """

    KIND = "network of merged tokens"
    FILE = "merges.safetensors"
    MADE = "make one with `decodery train merges -m MODEL FILES --out DIR`"

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def rows(self, mean: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """[n, hidden] embeddings of merged tokens, from the mean, first and last of their tokens'.

        What is added to the mean is as large as tokens' embeddings are; it is nothing where "second" is zero.
        """
        tensors = {name: each.to(mean) for name, each in self.tensors.items()}
        ends = torch.cat([level(each) for each in (mean, first, last)], dim=1)
        size = ((first.square() + last.square()) / 2).mean(dim=1, keepdim=True).sqrt()
        return mean + size * (gelu(linear(ends, tensors["first"], tensors["bias"])) @ tensors["second"].T)

    def check(self, model: Reader) -> None:
        """Raise SettingsError for another model than the one it was trained for."""
        self.refuse_other(model)
        if len(self.tensors["second"]) != model.config.hidden_size:
            raise SettingsError(f"this network is for a model of another width: {self.MADE}")

    @classmethod
    def initial(cls, hidden: int, width: int, seed: int = 0) -> MergeNet:
        """One that adds nothing."""
        draws = torch.Generator().manual_seed(seed)
        first = torch.randn(width, 3 * hidden, generator=draws, dtype=torch.float32, device="cpu") / (3 * hidden) ** 0.5
        return cls(
            {
                "first": first,
                "bias": torch.zeros(width, dtype=torch.float32, device="cpu"),
                "second": torch.zeros(hidden, width, dtype=torch.float32, device="cpu"),
            }
        )

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, self.tensors, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> MergeNet:
        shapes = {name: tuple(each.shape) for name, each in found.tensors.items() if each.is_floating_point()}
        width, hidden = len(found.tensors["bias"]), len(found.tensors["second"])
        expect(shapes == {"first": (width, 3 * hidden), "bias": (width,), "second": (hidden, width)})
        return cls(found.tensors, found.facts, found.model)
