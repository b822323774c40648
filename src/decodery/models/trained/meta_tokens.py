"""Soft tokens that are composed for every prompt of a small library, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.functional import gelu, linear

from decodery.core.errors import UnsupportedModel

from ..config import ModelConfig
from ..loaders.fields import Flag, Kind, Whole
from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect


def library(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[m, hidden] rows at right angles to each other, each as long as its scale."""
    return torch.linalg.qr(tensors["free"].T).Q.T * tensors["scale"][:, None]


def feature(embeddings: torch.Tensor, static: bool = False) -> torch.Tensor:
    """[2 * hidden] input of a selector: mean and last of a prompt's embeddings [n, hidden], normalised.

    Args:
        static: Nothing, so that all prompts get the same.
    """
    parts = [part / (part.norm() + 1e-6) for part in (embeddings.mean(dim=0), embeddings[-1])]
    found = torch.cat(parts)
    return torch.zeros_like(found) if static else found


def mixture(
    tensors: Mapping[str, torch.Tensor], shown: torch.Tensor, sparse: int, noise: torch.Tensor | None, heat: float
) -> torch.Tensor:
    """[k, m] weights of the library's rows in each token: softmax, cut to the largest `sparse`.

    Args:
        noise: [k, m], added to the selector's outputs before they are divided by `heat`; gradients see the whole
            softmax.
    """
    hidden = gelu(linear(shown, tensors["weight.0"], tensors["bias.0"]))
    scores = linear(hidden, tensors["weight.1"], tensors["bias.1"]).unflatten(0, (-1, len(tensors["scale"])))
    even = ((scores if noise is None else scores + noise) / heat).softmax(dim=-1)
    best = even.topk(min(sparse, even.shape[-1]), dim=-1)
    left = torch.zeros_like(even).scatter(-1, best.indices, best.values)
    left = left / left.sum(dim=-1, keepdim=True)
    return left.detach() + even - even.detach()


@dataclass(frozen=True, eq=False)
class MetaTokens(TrainedPart):
    """A library of soft tokens and the network that mixes them for a prompt.

    Attributes:
        tensors: "free" [m, hidden] and "scale" [m] of the `library`, weights and biases of the selector's two layers.
        sparse: How many rows of the library a token is made of.
        static: Whether all prompts get the same tokens.
        facts: How it was made.
        model: `fingerprint` of the model it belongs to, "" where any of its shape will do.
    """

    KIND = "library of meta-tokens"
    FILE = "meta-tokens.safetensors"
    MADE = "make one with `decodery train kv meta-soft -m MODEL FILES --out DIR`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"sparse": Whole(1, 1 << 16), "static": Flag()}

    tensors: Mapping[str, torch.Tensor]
    sparse: int
    static: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @classmethod
    def initial(
        cls, config: ModelConfig, size: float, m: int, k: int, sparse: int, static: bool = False, seed: int = 0
    ) -> MetaTokens:
        """One that nothing was learned for.

        Args:
            size: How long an embedding of the model is on average.
        """
        draws, hidden, inner = torch.Generator().manual_seed(seed), config.hidden_size, 256
        tensors = {
            "free": torch.randn(m, hidden, generator=draws, dtype=torch.float32, device="cpu"),
            "scale": torch.full((m,), size * sparse**0.5, dtype=torch.float32, device="cpu"),
            "weight.0": torch.randn(inner, 2 * hidden, generator=draws, dtype=torch.float32, device="cpu")
            / hidden**0.5,
            "bias.0": torch.zeros(inner, dtype=torch.float32, device="cpu"),
            "weight.1": torch.randn(k * m, inner, generator=draws, dtype=torch.float32, device="cpu") / inner**0.5,
            "bias.1": torch.randn(k * m, generator=draws, dtype=torch.float32, device="cpu") / 2,
        }
        return cls(tensors, sparse, static)

    def compose(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[k, hidden] the tokens of a prompt whose embeddings [n, hidden] are given, in float32."""
        tensors = {name: each.to(embeddings.device).float() for name, each in self.tensors.items()}
        return mixture(tensors, feature(embeddings.float(), self.static), self.sparse, None, 1.0) @ library(tensors)

    def require(self, model: Reader) -> None:
        """Raise UnsupportedModel or SettingsError for a model that it was not made for."""
        config: ModelConfig = model.config
        if self.tensors["free"].shape[1] != config.hidden_size:
            raise UnsupportedModel(f"these meta-tokens were made for a model of another shape: {self.MADE}")
        self.refuse_other(model)

    def artifact(self) -> Artifact:
        facts = {**self.facts, "sparse": self.sparse, "static": self.static}
        return Artifact(self.KIND, self.tensors, facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> MetaTokens:
        expect(_sound(found.tensors))
        return cls(found.tensors, found.facts["sparse"], found.facts["static"], found.facts, found.model)


def _sound(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all there is fits together."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    free, first, last = (shapes.get(name, ()) for name in ("free", "weight.0", "weight.1"))
    if not len(free) == len(first) == len(last) == 2 or not all(each.is_floating_point() for each in tensors.values()):
        return False
    m, hidden = free
    wanted = {"free": free, "scale": (m,), "weight.0": (first[0], 2 * hidden), "bias.0": first[:1]}
    wanted |= {"weight.1": (last[0], first[0]), "bias.1": last[:1]}
    return shapes == wanted and 0 < m <= hidden and last[0] > 0 and last[0] % m == 0
