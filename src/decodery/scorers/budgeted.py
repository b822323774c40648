"""Scores that count only within a budget of tokens: what teaches a model to be brief."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, scores_of

from .wrapper import Wrapper


@register(
    "budgeted",
    paper="Efficient Reasoning on the Edge (2026)",
    guarantee="the scorer itself up to `most` tokens, 0 from `most` + `spare` on",
    requirements=("a scorer whose scores are at least 0",),
)
@dataclass(frozen=True)
class Budgeted(Wrapper):
    """Multiplies scores by 1 up to `most` tokens, falling to 0 over the next `spare` ones.

    The product is published, the slope is a reading. Meant as the reward of `python benchmarks/train.py grpo`, whose
    models then write shorter texts.

    Attributes:
        most: Tokens up to which a score counts in full.
        spare: Tokens over which it falls to 0 after that.
        scorer: At least 0, as verifiers are, or its name.
    """

    most: int = 256
    spare: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most < 0 or self.spare < 1:
            raise SettingsError("budgeted needs most of at least 0 tokens, and at least 1 to spare")
        if not self.inner.bounds[0] >= 0 or self.inner.log:
            raise SettingsError(
                "budgeted takes from scores that are at least 0: give it a verifier, or another such one"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, self.inner.bounds[1]

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        found = yield from scores_of(self.inner, candidates)
        lengths = torch.tensor([len(output) for output in candidates.outputs], dtype=torch.float64, device="cpu")
        return found.double().cpu() * ((self.most + self.spare - lengths) / self.spare).clamp(0.0, 1.0)
