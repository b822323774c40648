"""Weighted vote: several texts vote for their answers, each with what a scorer says of it."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import ContextFull, ServerError, SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .answers import AnswerExtractor, Kind, Projection
from .judged import JudgedSearch
from .pool import Sampled, TextPool, require_count, scored
from .votes import elected, no_answer, vote_weights


@register(
    "weighted-vote",
    paper="Making Language Models Better Reasoners with Step-Aware Verifier (2023)",
    guarantee="self-consistency where all scores are equal",
    requirements=("a scorer of answers",),
    texts=("pattern",),
)
@dataclass(frozen=True)
class WeightedVote(Sampled, JudgedSearch):
    """Draws n texts, and returns one for each of their answers, that of the answer with most weight first.

    Of an answer the text of most weight is returned; the score is the answer's share of all weight. A text whose score
    fails has no vote. Memory: a cache per text.

    Attributes:
        n, answer, pattern: As for self-consistency.
        scorer: Of finished texts; a vote counts by its score, or by exp(score) where scores are logarithms. Scores are
            summed as they are.
    """

    n: int = 16
    answer: Kind | Projection = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("weighted-vote", "n", self.n)
        if not self.judge.answers:
            raise SettingsError("weighted-vote judges whole texts: give a scorer of answers")
        self._answers()

    def _answers(self) -> AnswerExtractor:
        return AnswerExtractor(self.answer, self.pattern)

    def shortcoming(self, score: float) -> str | None:
        return no_answer(score, self.n)

    def decide(self, pool: TextPool) -> ForwardCoroutine[list[Sequence]]:
        try:
            scores = yield from scored(self.judge, pool.texts)
        except (ContextFull, ServerError) as error:
            texts = pool.unjudged(error)
            return pool.finish(elected(texts, (yield from self._answers().of_texts(texts))))
        voting = [(seq, score) for seq, score in zip(pool.texts, scores, strict=True) if score is not None]
        weights = vote_weights(self.judge, [score for _, score in voting])
        texts = [seq for seq, _ in voting]
        return pool.finish(elected(texts, (yield from self._answers().of_texts(texts)), weights))
