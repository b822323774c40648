"""Sequential revisions: chains of attempts that are shown those before them; each chain votes, then all do."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .answers import AnswerExtractor, Kind, Projection, vote
from .judged import JudgedSearch, require_attempt
from .pipeline import Pipeline, require_texts, worth
from .pool import require_count
from .votes import elected, no_answer, vote_weights


@register(
    "revisions",
    paper="Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters (2024)",
    guarantee="length=1 is weighted-vote; none on quality: right attempts may be revised into wrong ones",
    requirements=("a scorer of answers", "a prompt that is text or chat"),
    texts=("pattern", "shown", "ask"),
)
@dataclass(frozen=True)
class Revisions(JudgedSearch, Pipeline):
    """Writes n chains of `length` attempts, each after those before it, and takes a vote.

    An attempt is asked for after the prompt, the last `window` attempts of its chain, each as `shown` says, and `ask`.
    In each chain the attempts vote, and the best one of the answer elected there votes for its chain; so that the last
    attempt is not simply taken, because right ones get revised, too. A text whose score fails has no vote. A chain
    whose next prompt would outgrow the model's context ends where it is, which the trace counts as "outgrown". n and
    length are of no published setting (their product is, from 1 to 256); window is. Memory: a cache per chain.

    Attributes:
        n: Chains.
        length: Attempts of a chain.
        window: Earlier attempts that an attempt is written after.
        shown, ask: Texts, in which {attempt} and {remark} stand for these. A model that was trained to revise wants the
            form it learned, as one of `python benchmarks/train.py puzzle-model prog:attempts=3` does:
            shown="{attempt}{remark}|",ask="".
        answer, pattern: As for self-consistency.
        scorer: Of finished texts; its scores are the weights of votes, and what it remarks on an attempt, such as the
            first test that fails, may be shown with it.
    """

    n: int = 4
    length: int = 4
    window: int = 4
    shown: str = "\n\nAn earlier attempt, which may be wrong:\n{attempt}\n{remark}"
    ask: str = "\n\nWrite a better attempt, complete in itself."
    answer: Kind | Projection = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "length", "window"):
            require_count("revisions", name, getattr(self, name))
        require_texts(self.judge, "revisions")
        require_attempt("revisions", self.shown)
        self._answers()

    def _answers(self) -> AnswerExtractor:
        return AnswerExtractor(self.answer, self.pattern)

    def shortcoming(self, score: float) -> str | None:
        return no_answer(score, self.n * self.length)

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.n

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        self.judge.fits(calls.engine.model)
        question = calls.conversation.question
        chains: list[list[Sequence]] = [[] for _ in range(self.n)]
        said = dict.fromkeys(range(self.n), calls.conversation)
        for number in range(self.length):
            texts = yield from calls.answer(list(said.values()), progress)
            for which, text in zip(said, texts, strict=True):
                chains[which].append(text)
            calls.standing = [text for chain in chains for text in chain]
            progress("revisions", number + 1, self.length)
            if number + 1 < self.length:
                asked = {}
                for which in said:
                    asked[which] = calls.conversation.asking((yield from self._prompt(question, chains[which])))
                said = {which: each for which, each in asked.items() if calls.fits(each)}
                if len(said) < len(asked):
                    count("outgrown", len(asked) - len(said))
                    calls.complete = False
            if not said:
                break
        scores = yield from worth(self.judge, calls, calls.standing)
        count("attempts", len(calls.standing))
        return (yield from self._elected(chains, scores))

    def _prompt(self, question: str, chain: Ordered[Sequence]) -> ForwardCoroutine[str]:
        shown = question
        for text in chain[-self.window :]:
            if text.text is not None:
                shown += yield from self.as_shown(self.shown, question, text.text.text)
        return shown + self.ask

    def _elected(
        self, chains: Ordered[Ordered[Sequence]], scores: Ordered[float | None]
    ) -> ForwardCoroutine[list[Sequence]]:
        """A text for each answer that some chain elects, that of most weight first. scores: chain after chain."""
        texts = [text for chain in chains for text in chain]
        known = [number for number, score in enumerate(scores) if score is not None]
        weights = vote_weights(self.judge, [score for score in scores if score is not None])
        weight = dict(zip(known, weights, strict=True))
        answers = yield from self._answers().of_texts(texts)
        winners, begin = list[int](), 0
        for chain in chains:
            members = [number for number in range(begin, begin + len(chain)) if number in weight]
            begin += len(chain)
            groups = vote([answers[number] for number in members], [weight[number] for number in members])
            if groups:
                winners.append(max((members[each] for each in groups[0].members), key=weight.__getitem__))
        if not winners:
            return elected([texts[known[0]]], [None])
        chosen = [texts[number] for number in winners]
        return elected(chosen, [answers[number] for number in winners], [weight[number] for number in winners])
