"""Self-consistency: several texts are drawn, and the answer that most of them give is returned."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .answers import AnswerExtractor, Kind, Projection
from .pool import Sampled, TextPool, require_count
from .votes import elected, no_answer


@register(
    "self-consistency",
    paper="Self-Consistency Improves Chain of Thought Reasoning in Language Models (2022)",
    guarantee="the most likely answer as n grows; n=1 is plain decoding",
    texts=("pattern",),
)
@dataclass(frozen=True)
class SelfConsistency(Sampled):
    """Draws n texts, and returns one for each of their answers, that of the answer with most votes first.

    Of an answer the text drawn first is returned, of equal votes the answer given first. The score is the share of the
    votes; texts without an answer have none. Memory: a cache per text.

    Attributes:
        n: Texts, by the request's own sampler, drafter and rule at seeds that count up from its seed, all in the same
            passes.
        answer: Where it stands in a text: "number" the last number, "marked" after the last marker (####, \\boxed,
            "answer is"), "auto" after a marker, or else the last number, "whole" all of the text; formulas after a
            marker are compared as mathematics. "choice" is the letter of an option, "quantity" the last number with
            its unit; a function of the text gives what is compared, None for no answer.
        pattern: A regular expression in its place, whose last match counts, its first group where it has one.
    """

    n: int = 40
    answer: Kind | Projection = "auto"
    pattern: str = ""

    requirements = Requirements()

    def __post_init__(self) -> None:
        require_count("self-consistency", "n", self.n)
        self._answers()

    def _answers(self) -> AnswerExtractor:
        return AnswerExtractor(self.answer, self.pattern)

    def shortcoming(self, score: float) -> str | None:
        return no_answer(score, self.n)

    def decide(self, pool: TextPool) -> ForwardCoroutine[list[Sequence]]:
        return pool.finish(elected(pool.texts, (yield from self._answers().of_texts(pool.texts))))
