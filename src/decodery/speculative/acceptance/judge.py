"""Judge Decoding: a trained head on the target's hidden states lets through drafts the target would word otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.config import LAYERS
from decodery.models.loaders.fields import Anything, Kind, Named, Number, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Head(TrainedPart):
    """A linear head on hidden states.

    Attributes:
        weight: [hidden] float32.
        layer: After how many layers the states are taken.
        facts: How it was trained and how good it is, as numbers and texts.
        model: `fingerprint` of the model it reads, "" where that is not known.
    """

    KIND = "judge"
    MADE = "make one with decodery train judge -m MODEL"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "layer": Whole(0, LAYERS.most),
        "bias": Number(-1e6, 1e6),
        "trained": Named(Anything(), 1 << 10),
    }

    weight: torch.Tensor
    bias: float
    layer: int
    facts: dict[str, Any] = field(default_factory=dict)
    model: str = ""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n] float64 log-odds that the tokens whose states [n, hidden] these are continue their texts well."""
        return normalized(hidden).double() @ self.weight.to(hidden.device).double() + self.bias

    def artifact(self) -> Artifact:
        facts = {"layer": self.layer, "bias": self.bias, "trained": self.facts}
        return Artifact(self.KIND, {"weight": self.weight.float()}, facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Head:
        weight = found.tensors["weight"]
        expect(weight.ndim == 1 and weight.is_floating_point())
        return cls(weight.float(), found.facts["bias"], found.facts["layer"], found.facts["trained"], found.model)


def normalized(hidden: torch.Tensor) -> torch.Tensor:
    """[n, hidden] float32 of root mean square 1, as the model's own final norm sees them."""
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)


@register(
    "judge",
    paper="Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model Alignment (2025)",
    guarantee="lossy: drafted tokens that a trained head finds valid are kept; threshold=1 is the coupled rule",
    requirements=(
        "a head made by `decodery train judge -m MODEL QUESTIONS --out DIR`; that of the embedded model missed its "
        "target: where it rejects 90 % of invalid tokens it keeps 21 % of valid ones",
    ),
)
@dataclass(frozen=True)
class Judge(AcceptanceRule):
    """Accepts what the coupled rule accepts, or what a trained head scores above `threshold`.

    Where the target's own choice is among the children the walk follows it, else the child the head likes best; where
    that is not enough the target's own choice is emitted. Nothing is promised of the distribution of the text, nor that
    what the target would never say stays out of it.

    Attributes:
        head: A file made by `decodery train judge`, or a `Head`. It reads the target's state at the drafted token
            itself, that is after the target has read it.
        threshold: Score, 0 to 1, above which a token is accepted.
    """

    head: Head | str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise SettingsError(f"judge needs a threshold between 0 and 1, not {self.threshold}")
        object.__setattr__(self, "head", Head.load(self.head))

    @property
    def trained(self) -> Head:
        assert isinstance(self.head, Head)
        return self.head

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(self.trained.layer,))

    def fits(self, model: Reader) -> None:
        self.trained.refuse_other(model, "train one for it with decodery train judge -m MODEL")

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        passing, scores = self._judged(laws)
        path: list[int] = []
        node = 0
        while True:
            token = laws.picks([node])[0]
            child = tree.child(node, token)
            if child is None:
                allowed = [
                    each
                    for each in tree.children(node).tolist()
                    if passing[each] and not seq.is_padding(tree.tokens[each])
                ]
                if not allowed:
                    return Accepted(path, token)
                child = max(allowed, key=lambda each: scores[each])
            path.append(child)
            node = child

    def _judged(self, laws: NodeDistributions) -> tuple[list[bool], list[float]]:
        """Of every node: whether the head lets it through, and its log-odds."""
        head = self.trained
        hidden = laws.hidden[head.layer]
        if hidden.shape[1] != len(head.weight):
            raise SettingsError(
                f"this judge was trained on hidden states of {len(head.weight)} numbers, and the model's have "
                f"{hidden.shape[1]}: train one for it with decodery train judge -m MODEL"
            )
        scores = head.logits(hidden)
        # In log-odds, so that 0 lets everything through and 1 nothing, however sure the head is.
        least = math.log(self.threshold / (1 - self.threshold)) if 0 < self.threshold < 1 else math.inf
        passing = scores > (-math.inf if self.threshold == 0 else least)
        return passing.tolist(), scores.tolist()
