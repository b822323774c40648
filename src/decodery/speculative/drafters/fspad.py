"""FSPAD: the chosen token samples the target's state in a wide space, and states and words are guessed apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import silu

from decodery.core.registry import register

from ..heads.drafter import HeadDrafter
from ..heads.feature import FeatureHead
from ..heads.grown import DraftHead


class FSPADHead(FeatureHead):
    """The token's embedding gates the state, both widened.

    After the layer one matrix guesses the next state to go on from, and another what the vocabulary projection is
    given, which need not resemble any state.
    """

    kind = "fspad"
    matched = 1.0

    @classmethod
    def fresh(cls, hidden: int, inner: int, like: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
        wide = {
            f"{name}.weight": (
                torch.randn(inner, hidden, generator=random, dtype=torch.float32, device="cpu") / hidden**0.5
            ).to(like)
            for name in ("gate", "widen")
        }
        same = {
            f"{name}.weight": torch.eye(hidden, dtype=torch.float32, device="cpu").to(like)
            for name in ("feature", "word")
        }
        return wide | {"narrow.weight": torch.zeros(hidden, inner, dtype=torch.float32, device="cpu").to(like)} | same

    def chosen(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        sampled = silu(self.parts.linear("gate")(embedded)) * self.parts.linear("widen")(features)
        return features + self.parts.linear("narrow")(sampled)

    def leave(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.parts.linear("feature")(stream), self.parts.linear("word")(stream)


@register(
    "fspad",
    paper="Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment Distillation (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind fspad",),
)
@dataclass(frozen=True)
class FSPAD(HeadDrafter):
    """Drafts as EAGLE does, but each token picks its branch of the state, and states are guessed apart.

    A state holds all that may follow it: gated by the embedding of the token that did, it becomes the layer's input.
    What words are read from is a projection of its own, so that resembling the next state costs no certainty. Scope:
    the request; memory: keys and values of one layer.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head` or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = FSPADHead
