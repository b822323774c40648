"""Iterative agent decoding: rounds of samples, each of which is shown the best and the worst of those before."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import inf
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import remark_of
from decodery.step.sequence import Sequence

from .judged import JudgedSearch, require_attempt
from .pipeline import Pipeline, require_texts, worth
from .pool import require_count
from .verdicts import spoken

_PATIENCE = 2
"""Rounds without a better text, after which no more follow."""
_CRITIQUE = (
    "Task:\n{task}\n\nAnswer:\n{answer}\n\nSay in a few sentences what is wrong or weak in this answer, and how it "
    "could be "
    "better. Do not write a new answer."
)

Feedback = Literal["none", "score", "best", "best-worst", "critique"]


@register(
    "iad",
    paper="Review, Refine, Repeat: Understanding Iterative Decoding of AI Agents (2025)",
    guarantee="the score of what is returned never falls from round to round; feedback=none is best-of-n",
    requirements=("a scorer of answers", "a prompt that is text or chat"),
    texts=("shown",),
)
@dataclass(frozen=True)
class IAD(JudgedSearch, Pipeline):
    """Draws n texts a round and scores them.

    From the second round on the prompt shows what was best and worst so far. A text takes the place of the best only
    where its score is higher, and of the worst only where it is lower. Memory: a cache per text of a round. A model
    that was trained to revise wants the form it learned, see revisions; then attempts stand after the prompt, the worst
    one first, and without scores.

    Attributes:
        n: Texts a round.
        rounds: With feedback, after the first one.
        feedback: What later prompts show, each level with what those before it show: "none" nothing, which is best-of-n
            of all rounds, "score" the best score, "best" the best text and what the scorer remarks on it, such as the
            first test that fails, "best-worst" the worst one too where its score is lower, "critique" also what the
            model says of the best one. It ends early where the largest score there can be is reached, or no better text
            was found in 2 rounds.
        shown: All this is said in words where it is "".
        scorer: Of finished texts.
    """

    n: int = 4
    rounds: int = 3
    feedback: Feedback = "best-worst"
    shown: str = ""

    def __post_init__(self) -> None:
        require_count("iad", "n", self.n)
        if not isinstance(self.rounds, int) or self.rounds < 0:
            raise SettingsError(f"iad needs 0 rounds with feedback or more, not {self.rounds!r}")
        super().__post_init__()
        require_texts(self.judge, "iad")
        if self.shown:
            require_attempt("iad", self.shown)
            if self.feedback not in ("none", "best", "best-worst"):
                raise SettingsError(
                    f"iad shows attempts alone where shown is given: leave feedback={self.feedback} out"
                )

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.n

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        self.judge.fits(calls.engine.model)
        seen: list[Sequence] = []
        stale = 0
        for number in range(self.rounds + 1):
            said = calls.conversation
            if seen and self.feedback != "none":
                said = said.asking((yield from self._prompt(calls, seen)))
            texts = yield from calls.answer([said] * self.n, progress)
            calls.standing = seen or texts
            scores = yield from worth(self.judge, calls, texts)
            before = seen[0].score if seen else None
            for seq, score in zip(texts, scores, strict=True):
                seq.score = score
            # A stable sort: of equal scores the earlier text stays ahead.
            seen = sorted([*seen, *(seq for seq in texts if seq.score is not None)], key=_score, reverse=True)
            calls.standing = seen
            count("rounds")
            if not seen:
                break
            best = seen[0].score
            stale = 0 if before is None or (best is not None and best > before) else stale + 1
            if best == self.judge.bounds[1] < inf or (self.feedback != "none" and stale >= _PATIENCE):
                break
            progress("iad", number + 1, self.rounds + 1)
        return seen

    def _prompt(self, calls: Calls, seen: Ordered[Sequence]) -> ForwardCoroutine[str]:
        """The task again, and what is known of the answers so far."""
        task, best = calls.conversation.question, seen[0]
        # Of equal scores the older text; as bad as the best is no worst.
        lowest = min(seen, key=_score)
        worst = [lowest] if self.feedback in ("best-worst", "critique") and _score(lowest) < _score(best) else []
        if self.shown:
            for each in (*worst, best):
                task += yield from self.as_shown(self.shown, calls.conversation.question, _text(each))
            return task
        parts = [task, ""]
        if self.feedback == "score":
            parts += [f"The best answer so far reached a score of {best.score:.4g}. Write a better one."]
            return "\n".join(parts)
        parts += [f"The best answer so far, with a score of {best.score:.4g}:", _text(best), ""]
        if remark := (yield from remark_of(self.judge, task, _text(best))):
            parts += [f"What is wrong with it: {remark}", ""]
        for each in worst:
            parts += [
                f"The worst answer so far, with a score of {each.score:.4g}; avoid what it does:",
                _text(each),
                "",
            ]
        if self.feedback == "critique":
            asked = calls.conversation.apart(_CRITIQUE.format(task=calls.conversation.task, answer=_text(best)))
            (said,) = yield from calls.judge([asked])
            parts += ["What is said of the best one:", spoken(said), ""]
        return "\n".join([*parts, "Improve on the best answer. Write a complete answer to the task."])


def _score(seq: Sequence) -> float:
    assert seq.score is not None
    return seq.score


def _text(seq: Sequence) -> str:
    assert seq.text is not None
    return seq.text.text.strip()
