"""Output confidence: how sure the model was of what it wrote, which every other monitor has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decodery.core.registry import register
from decodery.step.monitor import Monitor, Row
from decodery.step.sequence import Sequence


@register(
    "confidence",
    guarantee="read-only: the text is the one without it, until the action is taken",
    lossless=True,
)
@dataclass(frozen=True)
class Confidence(Monitor):
    """Scores a text by the model's own doubt about its tokens so far, in nats.

    Needs no training: give a threshold to have it flag.

    Attributes:
        measure: "mean", the mean of -log p over the tokens; "worst", the largest; "first", the first token's;
            "entropy", the mean entropy of the rows.
    """

    waits = "sums"

    measure: Literal["mean", "worst", "first", "entropy"] = "mean"

    def start(self, seq: Sequence) -> tuple[float, ...]:
        return ()

    def observe(self, state: tuple[float, ...], row: Row) -> tuple[float, ...]:
        """(tokens, sum of what is measured, largest, first)."""
        doubt = row.entropy if self.measure == "entropy" else -row.logprob
        if not state:
            return 1.0, doubt, doubt, doubt
        count, total, worst, first = state
        return count + 1, total + doubt, max(worst, doubt), first

    def score(self, state: tuple[float, ...]) -> float | None:
        if not state:
            return None
        count, total, worst, first = state
        return {"worst": worst, "first": first}.get(self.measure, total / count)
