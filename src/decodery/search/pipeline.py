"""What pipelines have in common: searches that ask for several texts, each after a prompt of its own."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from decodery.core.errors import ContextFull, ServerError, SettingsError
from decodery.core.ledger import count
from decodery.core.registry import method_of
from decodery.core.requirements import Requirements
from decodery.engine.calls import Calls
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer
from decodery.step.sequence import Sequence

from .base import Search, credit
from .pool import scored


@dataclass(frozen=True)
class Pipeline(Search):
    """A search by several prompts, which are made of the request's own.

    What it finds are answers to the request, whatever prompts they were written after; nothing of them is kept in a
    cache. Where a server goes away, or a prompt outgrows the model's context, the best that stands is found, with
    `complete=False`.
    """

    @property
    def requirements(self) -> Requirements:
        return Requirements()

    @property
    def resumable(self) -> bool:
        return True

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`: k says how many documents or questions are shown."""
        return 1

    @abstractmethod
    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        """The texts found, best first, with their `score` where they have one; asked for through `calls`.

        `calls.standing` is to hold what would be found if nothing more came.
        """

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        if request.conversation is None:
            method = method_of(self)
            name = type(self).__name__ if method is None else method.name
            raise SettingsError(f"{name} writes prompts of its own, and this one is token ids: search through `LLM`")
        calls = Calls(engine, replace(request, search=self), request.conversation)
        try:
            found = yield from self.follow(calls, progress)
        except (ContextFull, ServerError) as error:
            if not calls.standing:
                raise
            warnings.warn(f"this is what was found before: {error}", stacklevel=2)
            found, calls.complete = calls.standing, False
            if isinstance(error, ServerError):
                count("cut")
        count("discarded", calls.trace.ledger.tokens - len(found[0].generated))
        credit(calls.trace, found[0])
        answers = as_answers(calls, found)
        for seq in answers:
            seq.trace, seq.complete = calls.trace, calls.complete
        return answers


def as_answers(calls: Calls, texts: Ordered[Sequence]) -> list[Sequence]:
    """The texts as answers to the request's own prompt, after which nothing of them is read."""
    prompt = [int(token) for token in calls.request.prompt]
    return [
        replace(
            seq,
            request=replace(
                seq.request,
                prompt_length=len(prompt),
                conversation=calls.conversation,
                calls=calls,
                drafter=None,
            ),
            tokens=[*prompt, *seq.generated],
            cache=seq.request.model.new_cache(),
            states=seq.states.only(seq.request.monitors),
        )
        for seq in texts
    ]


def worth(scorer: Scorer, calls: Calls, texts: Ordered[Sequence]) -> ForwardCoroutine[list[float | None]]:
    """What a scorer says of texts as answers to the request, of equal ones once; None where it fails."""
    return (yield from scored(scorer, as_answers(calls, texts)))


def require_texts(scorer: Scorer, name: str) -> None:
    """Raise SettingsError for a scorer that sees more of an answer than a pipeline keeps, or scores none."""
    if not scorer.answers:
        raise SettingsError(f"{name} judges whole texts: give a scorer of answers")
    if scorer.requirements.taps:
        raise SettingsError(f"{name} keeps no hidden states of its texts: give a scorer that reads texts")
