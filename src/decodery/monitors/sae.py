"""Discrete SAE circuits: attention heads whose codes tell a behaviour, watched while a text is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.models.hooks import Intervention
from decodery.models.loaders.fields import Kind, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect, refuse_other
from decodery.step.monitor import Monitor, Row
from decodery.step.sequence import Sequence

from .threshold import Threshold

__all__ = ["HeadCodes"]

Head = tuple[int, int]
"""A layer and a head of it, both from 0."""


@dataclass(frozen=True, eq=False)
class HeadCodes(TrainedPart):
    """Codes of what heads wrote on examples of a behaviour: the largest autoencoder feature of each.

    Attributes:
        tensors: "weight" [features, dim] and "bias" [features] of the encoder; "mean" and "scale" [dim] of its input;
            "own" [layers * heads, features] bool: codes seen on examples of the behaviour and never on the others;
            "score" [layers * heads]: the share of the behaviour's examples on which a head wrote such a code.
        model: `fingerprint`.
    """

    KIND = "head codes"
    FILE = "sae.safetensors"
    MADE = "make them with `decodery train sae -m MODEL EXAMPLES --out DIR`"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "layers": Whole(1, 1 << 12),
        "heads": Whole(1, 1 << 12),
        "dim": Whole(1, 1 << 14),
    }

    tensors: Mapping[str, torch.Tensor]
    threshold: Threshold
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @one_thread()
    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] codes.

        Args:
            rows: [n, dim] as heads write them.
        """
        tensors = self.tensors
        given = (rows.double().cpu() - tensors["mean"].double()) / tensors["scale"].double()
        return (given @ tensors["weight"].double().T + tensors["bias"].double()).argmax(dim=-1)

    def ranked(self) -> list[tuple[Head, float]]:
        """All heads with their scores, the highest first."""
        scores, heads = self.tensors["score"].double(), self.facts["heads"]
        order = scores.argsort(descending=True, stable=True).tolist()
        return [((at // heads, at % heads), float(scores[at])) for at in order]

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, self.tensors, {**self.facts, "threshold": self.threshold.facts()}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> HeadCodes:
        facts, tensors = found.facts, found.tensors
        features, count, dim = tensors["bias"].shape[0], facts["layers"] * facts["heads"], facts["dim"]
        wanted = {"weight": (features, dim), "bias": (features,), "mean": (dim,), "scale": (dim,)}
        wanted |= {"own": (count, features), "score": (count,)}
        expect(features > 0 and {name: tuple(each.shape) for name, each in tensors.items()} == wanted)
        expect(tensors["own"].dtype == torch.bool and bool((tensors["scale"] > 0).all()))
        return cls(tensors, Threshold.of(facts.get("threshold") or {}), facts, found.model)


def silencing(heads: Iterable[Head], dim: int) -> tuple[Intervention, ...]:
    """Changes by which these heads write nothing: zeros before the output projection."""
    layers: dict[int, list[int]] = {}
    for layer, head in heads:
        layers.setdefault(layer, []).append(head)

    def change(own: list[int]) -> Any:
        def silent(rows: torch.Tensor, segment: object) -> torch.Tensor:
            found = rows.unflatten(-1, (-1, dim)).clone()
            found[:, own] = 0
            return found.flatten(-2)

        return silent

    return tuple(Intervention(f"head_out.{layer}", change(own)) for layer, own in sorted(layers.items()))


@register(
    "sae",
    paper="Sparse Autoencoders Enable Scalable and Reliable Circuit Identification in Language Models (2024)",
    guarantee="read-only unless action=switch, which silences heads in texts above the threshold and no others",
    requirements=("head codes made by decodery train sae",),
)
@dataclass(frozen=True)
class SAE(Monitor):
    """Scores tokens by how many of a behaviour's attention heads have the codes of its examples.

    The list itself is correlational: silencing is the causal check. Cost: a copy of the watched layers' head outputs
    per token, and a small product.

    Attributes:
        codes: A file or folder made by `decodery train sae`, or a `HeadCodes`.
        top: Heads that are watched, those that tell the behaviour best. The score is the share of them whose code was
            seen on the behaviour's examples alone.
        action: "switch" silences these heads while the score is above the threshold.
    """

    waits = "states"

    codes: HeadCodes | str | None = None
    top: int = 10
    action: Literal["flag", "stop", "switch"] = field(default="flag", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes", HeadCodes.load(self.codes, "sae:codes"))
        if self.top < 1:
            raise SettingsError(f"sae watches at least 1 head, not {self.top}")

    @property
    def trained(self) -> HeadCodes:
        assert isinstance(self.codes, HeadCodes)
        return self.codes

    @cached_property
    def heads(self) -> list[Head]:
        """Those that are watched."""
        return [head for head, score in self.trained.ranked()[: self.top] if score > 0]

    @property
    def requirements(self) -> Requirements:
        taps = tuple(f"head_out.{layer}" for layer in sorted({layer for layer, _ in self.heads}))
        return Requirements(taps=taps, changes=self.action == "switch")

    @property
    def limit(self) -> float:
        return self.trained.threshold.value if self.threshold is None else self.threshold

    def fits(self, model: Reader) -> None:
        facts, config = self.trained.facts, model.config
        if (facts["layers"], facts["heads"], facts["dim"]) != (config.num_layers, config.num_heads, config.head_dim):
            raise SettingsError(f"these head codes are of a model with other heads: {self.trained.MADE}")
        refuse_other("the head codes", self.trained.model, model, self.trained.MADE)

    def check(self, seq: Sequence) -> None:
        self.trained.threshold.check(seq, "sae", self.trained.MADE, own=self.threshold is not None)

    def start(self, seq: Sequence) -> float | None:
        return None

    def observe(self, state: float | None, row: Row) -> float | None:
        if not self.heads:
            return 0.0
        trained, dim = self.trained, self.trained.facts["dim"]
        rows = torch.stack([row.hidden[f"head_out.{layer}"].view(-1, dim)[head] for layer, head in self.heads])
        numbers = torch.tensor(
            [layer * trained.facts["heads"] + head for layer, head in self.heads], dtype=torch.int64, device="cpu"
        )
        return float(trained.tensors["own"][numbers, trained.of(rows)].double().mean())

    def score(self, state: float | None) -> float | None:
        return state

    def steering(self, state: float | None) -> str | None:
        return "silent" if self.action == "switch" and state is not None and state > self.limit else None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        return silencing(self.heads, self.trained.facts["dim"])
