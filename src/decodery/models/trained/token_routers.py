"""Which tokens of a prompt go around which layers: target sparsities, and small routers that decide, kept in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import silu

from decodery.core.errors import SettingsError

from .artifact import Artifact, TrainedPart, expect

INPUTS = 4
_SHAPES = ("in.weight", "in.bias", "out.weight", "out.bias")


def uniform(layers: int, sparsity: float) -> tuple[float, ...]:
    """Target sparsities [layers] of this mean: equal in all layers, 0 in the first and the last.

    Raises:
        SettingsError: If there is no such schedule.
    """
    most = max(0, layers - 2) / layers
    if not 0 <= sparsity <= most:
        raise SettingsError(f"a model of {layers} layers has mean sparsities from 0 to {most:.3g}, not {sparsity:g}")
    each = sparsity / most if most else 0.0
    return tuple(each if 0 < layer < layers - 1 else 0.0 for layer in range(layers))


def received(weights: torch.Tensor) -> torch.Tensor:
    """[n] the attention that each row is paid by later ones, the mean over heads and over them.

    The last row, which none follows, gets its own.

    Args:
        weights: [heads, n, n] of rows over themselves in causal order.
    """
    each = weights.mean(dim=0)
    own, n = each.diagonal(), each.shape[-1]
    later = torch.arange(n - 1, -1, -1, device=each.device)
    return torch.where(later > 0, (each.sum(dim=0) - own) / later.clamp(min=1), own)


def inputs(importance: torch.Tensor, sparsity: float) -> torch.Tensor:
    """[n, 4] float32, the inputs of a router for n tokens in text order, from their importance [n].

    Where a token stands, from 0 to 1; log(1 + n * importance), which is alike for texts of all lengths; its rank by
    importance, from 0 for the least to 1; the layer's target sparsity.
    """
    n, least = len(importance), max(1, len(importance) - 1)
    ranks = torch.empty(n, dtype=torch.int64, device="cpu")
    ranks[importance.argsort(stable=True)] = torch.arange(n, device="cpu")
    place = torch.arange(n, device="cpu") / least
    return torch.stack(
        (place, (n * importance).log1p(), ranks / least, torch.full((n,), sparsity, dtype=torch.float32, device="cpu")),
        dim=-1,
    ).float()


def least_important(importance: torch.Tensor, sparsity: float, free: torch.Tensor) -> torch.Tensor:
    """[n] bool: the floor(sparsity * n) tokens of least importance [n], among those that are `free` [n].

    Bool. The static router. The earlier one of two that are equally important goes first.
    """
    wanted = min(math.floor(sparsity * len(importance) + 1e-9), int(free.sum()))
    order = importance.masked_fill(~free, torch.inf).argsort(stable=True)
    skips = torch.zeros_like(free)
    skips[order[:wanted]] = True
    return skips


@dataclass(frozen=True, eq=False)
class TokenRouters(TrainedPart):
    """Target sparsities of all layers, and what decides which tokens go around each of them.

    Attributes:
        schedule: [layers], the share of tokens that goes around each; none around the first, since there is nothing yet
            to tell tokens by.
        weights: Of an MLP per layer, "in.weight" [layers, width, 4], "in.bias" [layers, width], "out.weight" [layers,
            2, width] and "out.bias" [layers, 2], float32, which says keep (0) or skip (1); empty for the static router,
            which skips those of least importance.
        facts: How they were made, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where that is not known.
    """

    KIND = "set of token routers"
    FILE = "routers.safetensors"
    MADE = "make one with decodery train ftp -m MODEL"

    schedule: tuple[float, ...]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def __post_init__(self) -> None:
        if not self.schedule or self.schedule[0] or not all(0 <= each <= 1 for each in self.schedule):
            raise SettingsError("a schedule needs a sparsity from 0 to 1 for every layer, and 0 for the first one")

    @classmethod
    def initial(cls, schedule: Sequence[float], width: int, seed: int = 0) -> TokenRouters:
        """Routers that have learned nothing."""
        generator, layers = torch.Generator().manual_seed(seed), len(schedule)

        def drawn(*shape: int) -> torch.Tensor:
            return (
                torch.randn(layers, *shape, generator=generator, dtype=torch.float32, device="cpu") * shape[-1] ** -0.5
            )

        weights = (
            drawn(width, INPUTS),
            torch.zeros(layers, width, dtype=torch.float32, device="cpu"),
            drawn(2, width),
            torch.zeros(layers, 2, dtype=torch.float32, device="cpu"),
        )
        return cls(tuple(schedule), dict(zip(_SHAPES, weights, strict=True)))

    @property
    def sparsity(self) -> float:
        """The mean of the schedule."""
        return sum(self.schedule) / len(self.schedule)

    def logits(self, layer: int, shown: torch.Tensor) -> torch.Tensor:
        """[n, 2] keep and skip, of what a layer's router is shown [n, 4]."""
        into, lean, out, bias = (self.weights[name][layer] for name in _SHAPES)
        return silu(shown @ into.T + lean) @ out.T + bias

    def skips(self, layer: int, importance: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """[n] bool: the tokens that skip a layer, from their importance [n] and which are `free` to."""
        sparsity = self.schedule[layer]
        if not self.weights:
            return least_important(importance, sparsity, free)
        keep, skip = self.logits(layer, inputs(importance, sparsity)).unbind(-1)
        return (skip > keep) & free

    def artifact(self) -> Artifact:
        schedule = torch.tensor(self.schedule, dtype=torch.float64, device="cpu")
        return Artifact(self.KIND, {**self.weights, "schedule": schedule}, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> TokenRouters:
        tensors = dict(found.tensors)
        schedule = tensors.pop("schedule")
        expect(schedule.dtype == torch.float64 and schedule.ndim == 1)
        if tensors:
            layers, width, _ = tensors["in.weight"].shape
            shapes = (layers, width, INPUTS), (layers, width), (layers, 2, width), (layers, 2)
            given = {name: tuple(each.shape) for name, each in tensors.items() if each.dtype == torch.float32}
            expect(layers == len(schedule) and given == dict(zip(_SHAPES, shapes, strict=True)))
        try:
            return cls(tuple(schedule.tolist()), tensors, found.facts, found.model)
        except SettingsError as error:
            raise ValueError from error
