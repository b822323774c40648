"""Stop where the draft model itself is in doubt."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy, Outlook
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence


def top_probability(law: torch.Tensor) -> float:
    """The largest probability of unnormalised log-probabilities [vocab]."""
    return float((law.max() - law.logsumexp(dim=-1)).exp())


def entropy_of(law: torch.Tensor) -> float:
    """The entropy of unnormalised log-probabilities [vocab], in nats."""
    logprobs = law.log_softmax(dim=-1)
    # What is excluded has a log-probability of -inf and adds nothing.
    return float(-(logprobs.exp() * logprobs.clamp_min(-1e4)).sum())


@register(
    "confidence",
    paper="Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models (2024)",
    lossless=True,
)
@dataclass(frozen=True)
class Confidence(DraftLengthPolicy):
    """Ends a chain before a token that the draft model would have to guess.

    It ends where the most likely token of the next draw has less than `probability`, or where that draw's entropy
    (nats) exceeds `entropy`; None leaves a test out. Looking at the next draw costs one draft pass more per step than
    drawing; the draft model need not read that token again if it is accepted.

    Attributes:
        probability: A chain ends if the next draw's most likely token has less; None for no such test.
        entropy: A chain ends if the next draw's entropy in nats is higher; None for no such test.
        longest: Tokens drafted per step at most. At temperature 0 the distribution is the draft's own at temperature 1.
    """

    probability: float | None = 0.4
    entropy: float | None = None
    longest: int = 20

    requirements = Requirements(pauses=True)

    def __post_init__(self) -> None:
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise SettingsError(f"confidence needs a probability between 0 and 1, not {self.probability}")
        if self.entropy is not None and not self.entropy >= 0:
            raise SettingsError(f"confidence needs an entropy of 0 nats or more, not {self.entropy}")
        if self.longest < 1:
            raise SettingsError(f"confidence needs longest >= 1, not {self.longest}")

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        return replace(limit, depth=min(self.longest, limit.depth))

    def goes_on(self, seq: Sequence, outlook: Outlook) -> ForwardCoroutine[bool]:
        if self.probability is None and self.entropy is None:
            return True
        law = yield from outlook.law()
        if self.probability is not None and top_probability(law) < self.probability:
            return False
        return self.entropy is None or entropy_of(law) <= self.entropy
