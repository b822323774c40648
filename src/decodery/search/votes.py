"""What searches make of votes: a text for each answer, the elected one first."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered

import torch

from decodery.core.ledger import count
from decodery.step.scorer import Scorer, log_scores
from decodery.step.sequence import Sequence

from .answers import vote


def elected(
    texts: Ordered[Sequence], answers: Ordered[str | None], weights: Ordered[float] | None = None
) -> list[Sequence]:
    """For each answer the text of largest weight, scored by the answer's share of all weight.

    Among equals the first text is taken. The answer of most weight comes first. Without any answer, or any weight, the
    first text comes with the score 0.

    Args:
        weights: Of each text, at least 0; all 1 by default.
    """
    groups = vote(answers, weights)
    total = math.fsum(group.weight for group in groups)
    count("answers", len(groups))
    if not groups:
        texts[0].score = 0.0
        return [texts[0]]
    found = []
    for group in groups:
        best = max(group.members, key=lambda number: 1.0 if weights is None else weights[number])
        texts[best].score = group.weight / total if total else 0.0
        found.append(texts[best])
    return found


def vote_weights(scorer: Scorer, scores: Ordered[float]) -> list[float]:
    """What votes count whose texts have these scores: the scores, or exp of what are logarithms.

    All are divided by the largest: what they have in common changes no vote, and what is left does not vanish.
    """
    logs = log_scores(scorer, torch.tensor(scores, dtype=torch.float64, device="cpu"))
    return [math.exp(log) for log in (logs - logs.max().clamp(min=-1e300)).tolist()]


def no_answer(score: float, texts: int) -> str | None:
    """What a vote of this score lacks, in a sentence; None for nothing."""
    if score > 0:
        return None
    return f"no answer was found in {texts} texts: say where it stands (answer, pattern), or allow more tokens"
