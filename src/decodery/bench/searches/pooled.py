"""Searches that choose among samples, on samples that are drawn once for all of them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import dataclass
from typing import TypeGuard

from decodery.core.errors import DecoderyError, OutOfMemory, ServerError, ServerRefused
from decodery.core.ledger import charged
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.search.adaptive_sampling import AdaptiveSampling
from decodery.search.base import Search, written
from decodery.search.pool import Sampled, TextPool
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence


@dataclass(frozen=True)
class Found:
    """What a search found for a problem.

    Attributes:
        text: The best one; "" where it failed.
        tokens: Written for it, the first n of the samples.
        scorer_calls: Of it.
        error: Why there is no text.
        lost: Whether a server went away in the middle, so that this says nothing of the search.
    """

    text: str
    tokens: int
    scorer_calls: int
    error: str = ""
    lost: bool = False

    @classmethod
    def failed(cls, error: DecoderyError, tokens: int = 0, scorer_calls: int = 0) -> Found:
        """Nothing, because of an error."""
        lost = isinstance(error, ServerError) and not isinstance(error, ServerRefused)
        return cls("", tokens, scorer_calls, str(error), lost)


class Pooled(Search):
    """Draws as many samples as the largest of some searches needs, and has each choose among its first n.

    Sample i is that of seed + i, as in the searches themselves.

    Args:
        searches: What chooses.

    Attributes:
        found: What each of them found, after a run.
    """

    requirements = Sampled.requirements

    def __init__(self, searches: Ordered[Sampled | AdaptiveSampling]) -> None:
        self.searches, self.found = searches, list[Found]()

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return max(each.n for each in self.searches)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        # The requirements checked are those of the searches, one after the other.
        first = max(self.searches, key=lambda each: each.n)
        for search in self.searches:
            search.fits(engine.model)
        pool = TextPool(engine, request, first, first.n)
        yield from pool.write(progress)
        for search in self.searches:
            own = copy(pool)
            own.texts, own.trace = [copy(seq) for seq in pool.texts[: search.n]], Trace(ledger=pool.trace.ledger)
            tokens, before = sum(len(written(seq)) for seq in own.texts), charged().scorer_calls
            try:
                if isinstance(search, AdaptiveSampling):
                    own.texts = yield from self._until(search, own.texts)
                    tokens = sum(len(written(seq)) for seq in own.texts)
                    best = max(own.texts, key=lambda seq: seq.score or 0.0)
                else:
                    best = (yield from search.decide(own))[0]
                text = best.text.text if best.text is not None else ""
                # Without the samples that were cut, the first n are others.
                lost = "cut" in charged().counts
                self.found.append(Found(text, tokens, charged().scorer_calls - before, lost=lost))
            except DecoderyError as error:
                self.found.append(Found.failed(error, tokens, charged().scorer_calls - before))
        return pool.texts

    @staticmethod
    def _until(search: AdaptiveSampling, texts: list[Sequence]) -> ForwardCoroutine[list[Sequence]]:
        """The first texts, up to one that is good enough."""
        failed: DecoderyError | None = None
        for number, seq in enumerate(texts):
            try:
                yield from search.score_from(texts[: number + 1], number)
            except (OutOfMemory, ServerError):
                raise
            except DecoderyError as error:
                # The search leaves such a text out too.
                failed = error
            if seq.score is not None and seq.score >= search.threshold:
                return texts[: number + 1]
        if failed is not None and all(seq.score is None for seq in texts):
            raise failed
        return texts


def takes_part(search: object) -> TypeGuard[Sampled | AdaptiveSampling]:
    """Whether a search chooses among the first of n samples that nothing but their seeds tells apart."""
    alike = isinstance(search, AdaptiveSampling) and search.schedule == "constant" and search.width == 1
    return isinstance(search, Sampled) or alike
