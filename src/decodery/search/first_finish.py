"""First Finish Search: several texts are written at once, and the shortest one is the answer."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .answers import AnswerExtractor, Kind
from .base import Search
from .pool import TextPool, require_count
from .votes import elected


@register(
    "first-finish",
    paper="First Finish Search: Efficient Test-Time Scaling in Large Language Models (2025)",
    guarantee="the shortest of n draws, whatever drafts and however passes are timed; n=1 is plain decoding",
    texts=("pattern",),
)
@dataclass(frozen=True)
class FirstFinish(Search):
    """Draws n texts and returns the one that ends after the fewest tokens.

    The others stop as soon as they cannot. Of equal lengths the text drawn first wins. With k=1 the score is minus the
    length in tokens. Tokens of texts that were stopped count as "discarded" in the trace.

    Attributes:
        n: Texts, by the request's own sampler, drafter and rule at seeds that count up from its seed, all in the same
            passes.
        k: Wait for the k shortest, and return one for each of their answers as self-consistency does.
        answer, pattern: As there; a text without an answer, or one that is cut by its length, does not count, and
            without any that does the first text is returned, without a score.
    """

    n: int = 4
    k: int = 1
    answer: Kind = "whole"
    pattern: str = ""

    requirements = Requirements()

    def __post_init__(self) -> None:
        require_count("first-finish", "n", self.n)
        require_count("first-finish", "k", self.k)
        if self.k > self.n:
            raise SettingsError(f"first-finish waits for {self.k} of {self.n} texts: give a k of at most n")
        self._answers()

    def _answers(self) -> AnswerExtractor:
        return AnswerExtractor(self.answer, self.pattern)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        pool, race = TextPool(engine, request, self, self.n), _Race(self._answers(), self.k)
        place = {id(seq): number for number, seq in enumerate(pool.texts)}

        def ended() -> list[_Ended]:
            return [(len(each.generated), place[id(each)], each) for each in pool.texts if each.finished]

        def may_win(seq: Sequence) -> bool:
            # It ends after one more token at the earliest. Whoever has just ended is looked at first.
            return not race.fresh(ended()) and race.open_for(len(seq.generated) + 1, place[id(seq)])

        yield from pool.turns(progress, may_win)
        while fresh := race.fresh(ended()):
            yield from race.take(fresh)
            yield from pool.turns(progress, may_win)
        pool.leave_out_cut()
        if not race.ended:
            return pool.finish(pool.texts[:1])
        first = [seq for _, _, seq in race.ended[: self.k]]
        for seq in pool.texts:
            seq.cancel()
        if self.k > 1:
            # All of them at once: what is spelt differently may be the same.
            return pool.finish(elected(first, (yield from self._answers().of_texts(first))))
        first[0].score = -float(len(first[0].generated))
        return pool.finish(first)


_Ended = tuple[int, int, Sequence]
"""A text that has ended: its length, its number, itself."""


class _Race:
    """Who has ended with an answer. ended: the best first."""

    def __init__(self, answers: AnswerExtractor, k: int) -> None:
        self.ended: list[_Ended] = []
        self._seen: set[int] = set()
        self._find, self._k = answers, k

    def fresh(self, ended: list[_Ended]) -> list[_Ended]:
        """Those that were not looked at yet."""
        return [each for each in ended if id(each[2]) not in self._seen]

    def take(self, fresh: list[_Ended]) -> ForwardCoroutine[None]:
        """Look at texts that have ended."""
        answers = yield from self._find.of_texts([seq for _, _, seq in fresh])
        for each, answer in zip(fresh, answers, strict=True):
            self._seen.add(id(each[2]))
            if answer is not None and each[2].finish_reason == "stop":
                self.ended.append(each)
        self.ended.sort(key=lambda each: each[:2])

    def open_for(self, length: int, number: int) -> bool:
        """Whether a text of this number can still be among the best with so many tokens."""
        return len(self.ended) < self._k or (length, number) < self.ended[self._k - 1][:2]
