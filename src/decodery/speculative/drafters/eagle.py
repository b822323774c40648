"""EAGLE: one layer continues the target's last states, each beside the token that was chosen after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decodery.core.registry import register

from ..heads.drafter import HeadDrafter
from ..heads.feature import FeatureHead
from ..heads.grown import DraftHead


class EAGLEHead(FeatureHead):
    """A state and the embedding of the token chosen after it become one.

    Of that the layer guesses the next state.
    """

    kind = "eagle"
    # A tenth of the words' weight, and both are learned at a rate that knows no scale.
    matched = 10.0

    @classmethod
    def fresh(cls, hidden: int, inner: int, like: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
        weight = torch.cat(
            [
                torch.zeros(hidden, hidden, dtype=torch.float32, device="cpu"),
                torch.eye(hidden, dtype=torch.float32, device="cpu"),
            ],
            dim=1,
        ).to(like)
        return {"fc.weight": weight, "fc.bias": torch.zeros(hidden, dtype=torch.float32, device="cpu").to(like)}

    def chosen(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return self.parts.linear("fc")(torch.cat((embedded, features), dim=-1))


@register(
    "eagle",
    paper="EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind eagle",),
)
@dataclass(frozen=True)
class EAGLE(HeadDrafter):
    """Drafts by one decoder layer that predicts the target's next state from state and token.

    The target's own vocabulary projection turns guessed states into words, and the layer goes on from them. With the
    tree policy "eagle-2" it is EAGLE-2. Scope: the request; memory: keys and values of one layer.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head`, a folder or Hub id as the authors or vLLM's `speculators`
            publish them or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = EAGLEHead
