"""Feature vote: texts vote for their answers, each with what its wording says about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .answers import AnswerExtractor, Kind, Projection
from .base import written
from .features import features, standardised
from .pool import Sampled, TextPool, require_count
from .votes import elected, no_answer


@register(
    "feature-vote",
    paper="Think Deep, Think Fast: Investigating Efficiency of Verifier-free Inference-time-scaling Methods (2025)",
    guarantee="self-consistency with weights of 0, but that the shorter text wins a tie",
    texts=("pattern",),
)
@dataclass(frozen=True)
class FeatureVote(Sampled):
    """Draws n texts that vote for their answers.

    One text is returned for each answer, that of most weight first; there is no scorer. Of equal answers, and of equal
    votes, the shorter text wins. The score is the answer's share of all weight.

    Attributes:
        n, answer, pattern: As for self-consistency.
        drop: The share of the texts with an answer that is left out before the vote, the longest ones.
        weights: Of length, hedging markers (maybe), thinking markers (wait) and discourse markers (therefore), markers
            counted per token, and all of them standardised within the pool; a vote weighs sigmoid(weights . features +
            bias). By default they have the signs of the paper's findings and one size; `decodery.search.features` is
            for who fits others.
        bias: Added to the weighted features.
    """

    n: int = 16
    drop: float = 0.0
    weights: tuple[float, float, float, float] = (-1.0, -1.0, -1.0, 1.0)
    bias: float = 0.0
    answer: Kind | Projection = "auto"
    pattern: str = ""

    requirements = Requirements()

    def __post_init__(self) -> None:
        require_count("feature-vote", "n", self.n)
        require_number("the drop of feature-vote", self.drop, least=0.0, most=1.0)
        if len(self.weights) != 4:
            raise SettingsError("feature-vote has four weights: of length, hedging, thinking and discourse")
        for each in (*self.weights, self.bias):
            require_number("a weight of feature-vote", each)
        self._answers()

    def _answers(self) -> AnswerExtractor:
        return AnswerExtractor(self.answer, self.pattern)

    def shortcoming(self, score: float) -> str | None:
        return no_answer(score, self.n)

    def decide(self, pool: TextPool) -> ForwardCoroutine[list[Sequence]]:
        return pool.finish(self._elected(pool.texts, (yield from self._answers().of_texts(pool.texts))))

    def _elected(self, texts: list[Sequence], answers: list[str | None]) -> list[Sequence]:
        # The shorter text comes first and so wins what is equal.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].generated))
        texts, answers = [texts[number] for number in order], [answers[number] for number in order]
        voting = [number for number, answer in enumerate(answers) if answer is not None]
        for number in voting[len(voting) - math.floor(self.drop * len(voting)) :]:
            if number != voting[0]:
                answers[number] = None
        return elected(texts, answers, self._weighed(texts))

    def _weighed(self, texts: list[Sequence]) -> list[float]:
        told = [features("" if seq.text is None else seq.text.text, len(written(seq))) for seq in texts]
        sums = standardised(told) @ np.array(self.weights) + self.bias
        return (1 / (1 + np.exp(-sums))).tolist()
