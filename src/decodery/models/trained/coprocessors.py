"""A coprocessor: soft tokens and adapters by which a model makes latents of what it has read, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu

from decodery.core.errors import UnsupportedModel

from ..batch import Segment
from ..config import ModelConfig
from ..hooks import Intervention
from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect


def adapted(tensors: Mapping[str, torch.Tensor]) -> tuple[Intervention, ...]:
    """Changes that turn a model's passes into the coprocessor's: an adapter after each layer."""
    return tuple(
        Intervention(f"resid_post.{layer}", partial(_adapt, down=down, up=up))
        for layer, (down, up) in enumerate(zip(tensors["down"], tensors["up"], strict=True))
    )


def _adapt(rows: torch.Tensor, segment: Segment, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    down, up = (each.to(rows.device, rows.dtype) for each in (down, up))
    # What is returned is written over what was given, which gradients still go through.
    rows = rows.clone()
    return rows + gelu(level(rows) @ down.T) @ up.T


def level(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, d] with a mean square of 1."""
    return rows / (rows.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def latents(tensors: Mapping[str, torch.Tensor], states: torch.Tensor | None) -> torch.Tensor:
    """[n, hidden] what the model is given, of the coprocessor's last states [n, hidden].

    None for what is static.
    """
    if states is None:
        return tensors["base"]
    base, gain = (tensors[name].to(states.device, states.dtype)[: len(states)] for name in ("base", "gain"))
    return base + gain[:, None] * level(states)


@dataclass(frozen=True, eq=False)
class CoprocessorWeights(TrainedPart):
    """Weights of a cache coprocessor.

    Attributes:
        tensors: "base" [n, hidden], where the latents begin, and, unless they are static, "soft" [n, hidden], the
            coprocessor's inputs, "gain" [n] of its outputs, "down" [layers, rank, hidden] and "up" [layers, hidden,
            rank].
        facts: How it was made.
        model: `fingerprint` of the model it belongs to, "" where any of its shape will do.
    """

    KIND = "coprocessor"
    FILE = "coprocessor.safetensors"
    MADE = "make one with `decodery train kv coprocessor -m MODEL FILES --out DIR`"

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def __len__(self) -> int:
        return len(self.tensors["base"])

    @property
    def static(self) -> bool:
        """Whether the latents are the same for all texts."""
        return "soft" not in self.tensors

    @classmethod
    def initial(
        cls, config: ModelConfig, embeddings: torch.Tensor, rank: int, static: bool = False, seed: int = 0
    ) -> CoprocessorWeights:
        """One that nothing was learned for.

        Args:
            embeddings: [n, hidden], where soft tokens and latents begin.
        """
        n, hidden = embeddings.shape
        tensors = {"base": embeddings.clone()}
        if not static:
            down = torch.randn(
                config.num_layers,
                rank,
                hidden,
                generator=torch.Generator().manual_seed(seed),
                dtype=torch.float32,
                device="cpu",
            )
            size = float(embeddings.square().mean().sqrt())
            tensors["soft"], tensors["gain"] = (
                embeddings.clone(),
                torch.full((n,), size / 10, dtype=torch.float32, device="cpu"),
            )
            tensors["down"], tensors["up"] = (
                down / hidden**0.5,
                torch.zeros(config.num_layers, hidden, rank, dtype=torch.float32, device="cpu"),
            )
        return cls(tensors)

    def require(self, model: Reader) -> None:
        """Raise UnsupportedModel or SettingsError for a model that it was not made for."""
        config: ModelConfig = model.config
        layers = config.num_layers if self.static else len(self.tensors["down"])
        if (layers, self.tensors["base"].shape[1]) != (config.num_layers, config.hidden_size):
            raise UnsupportedModel(f"this coprocessor was made for a model of another shape: {self.MADE}")
        self.refuse_other(model)

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, self.tensors, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> CoprocessorWeights:
        expect(_sound(found.tensors))
        return cls(found.tensors, found.facts, found.model)


def _sound(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all there is fits together."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    base = shapes.get("base", ())
    if len(base) != 2 or min(base) < 1 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        return False
    if set(shapes) == {"base"}:
        return True
    down = shapes.get("down", ())
    if len(down) != 3:
        return False
    layers, rank, hidden = down
    wanted = {"base": base, "soft": base, "gain": base[:1], "down": down, "up": (layers, hidden, rank)}
    return shapes == wanted and hidden == base[1]
