"""A process reward model: how likely a text is to end rightly, by a small network on the model's own hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import relu

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.config import LAYERS
from decodery.models.loaders.fields import Kind, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer

from .reading import read, reader

_SHAPES = {"inner.weight": 2, "inner.bias": 1, "outer.weight": 1, "outer.bias": 0}

__all__ = ["ProcessHead"]


@dataclass(frozen=True, eq=False)
class ProcessHead(TrainedPart):
    """Two layers on a hidden state.

    Tensors: inner.weight [k, hidden] and inner.bias [k], outer.weight [k] and outer.bias [].

    Attributes:
        tensors: These, float32.
        tap: After how many layers it reads.
        model: `fingerprint` of the model it reads, "" where that is not known.
        facts: How it was made.
    """

    KIND = "process reward head"
    MADE = "make one with `decodery train text-prm TEXTS -m MODEL`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"tap": Whole(0, LAYERS.most)}

    tensors: dict[str, torch.Tensor]
    tap: int
    model: str = ""
    facts: dict[str, object] | None = None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n] logits of ending rightly."""
        parts = self.tensors
        inner = relu(states.to(parts["inner.weight"]) @ parts["inner.weight"].T + parts["inner.bias"])
        return inner @ parts["outer.weight"] + parts["outer.bias"]

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, self.tensors, {**(self.facts or {}), "tap": self.tap}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> ProcessHead:
        tensors = {name: tensor.float() for name, tensor in found.tensors.items()}
        expect({name: tensor.dim() for name, tensor in tensors.items()} == _SHAPES)
        expect(len(tensors["inner.weight"]) == len(tensors["inner.bias"]) == len(tensors["outer.weight"]))
        facts = {name: value for name, value in found.facts.items() if name != "tap"}
        return cls(tensors, found.facts["tap"], found.model, facts)


@register(
    "process-reward",
    paper="Let's Verify Step by Step (2023)",
    guarantee="as good as its training",
    requirements=("a head made by decodery train text-prm",),
)
@dataclass(frozen=True)
class ProcessReward(Scorer):
    """Scores texts by a trained head's probability, at their last token, of a right final answer.

    Attributes:
        head: A file made by `decodery train text-prm`, or a `ProcessHead`. It asks the model for that token's state, so
            that every search can use it: one row per candidate, where the rest is read already.
    """

    head: ProcessHead | str

    bounds = 0.0, 1.0
    requirements = Requirements(rows=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", ProcessHead.load(self.head))

    @property
    def trained(self) -> ProcessHead:
        assert isinstance(self.head, ProcessHead)
        return self.head

    def fits(self, model: Reader) -> None:
        head, config = self.trained, model.config
        width = head.tensors["inner.weight"].shape[1]
        if width != config.hidden_size or not 0 <= head.tap <= config.num_layers:
            raise SettingsError(
                f"this process reward head reads {width} numbers after layer {head.tap}, and the model has "
                f"{config.hidden_size} in {config.num_layers} layers: use one that was trained for this model"
            )
        head.refuse_other(model, "train one for it with `decodery train text-prm TEXTS -m MODEL`")

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        model = reader(candidates, "process-reward")
        self.fits(model)
        found = torch.zeros(len(candidates), dtype=torch.float64, device="cpu")

        def take(number: int, row: int, states: torch.Tensor) -> None:
            found[number] = torch.sigmoid(self.trained.logits(states[-1:])[0].double())

        texts = [[*candidates.prompt, *output] for output in candidates.outputs]
        yield from read(candidates, model, texts, [1] * len(texts), take, self.trained.tap)
        return found
