"""Several texts of one prompt, written by the loop as each would be alone, and what scorers say of them."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import replace

import torch

from decodery.core.errors import DecoderyError, OutOfMemory, ServerError, SettingsError
from decodery.core.ledger import count
from decodery.core.noise import nth_seed
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.recorded import RecordedTexts
from decodery.engine.request import Request
from decodery.engine.schedule import share_prompt
from decodery.engine.text import unread
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.store import Progress, silent
from decodery.step.embedded import reading
from decodery.step.forward_request import ForwardCoroutine, score_all
from decodery.step.scorer import Scorer, judge
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .base import Search, candidates, credit, written
from .step_nodes import identity

_CHUNK = 64


class TextPool:
    """Independent texts of one prompt; number i is what the request would write with its seed + i.

    They share what is read of the prompt, and their passes.

    Args:
        vary: The request of a text by its number, where they are not all alike.
        complete: Whether none was cut because its writer went away.
        trace: Of all of them together.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        search: Search,
        count: int,
        vary: Callable[[Request, int], Request] = lambda request, number: request,
    ) -> None:
        self.engine = engine
        self._first, self._vary = replace(request, search=search), vary
        self.texts: list[Sequence] = []
        self.complete = True
        self.open(count)
        self.trace = Trace(ledger=self.texts[0].trace.ledger)

    def open(self, count: int) -> None:
        """Begin further texts, until there are so many."""
        self.engine.check_width(count)
        for number in range(len(self.texts), count):
            seq = self.engine.open(_drawn_apart(self._vary(self._first, number), number))
            if not self.texts:
                self.engine.recall(seq)
            else:
                seq.scheduling.prompt_owner = self.texts[0]
                if seq.scheduling.prompt_owner.finished:
                    share_prompt(seq, seq.scheduling.prompt_owner)
            self.texts.append(seq)

    def write(
        self, progress: Progress, goes_on: Callable[[Sequence], bool] = lambda seq: True
    ) -> ForwardCoroutine[None]:
        """`turns`, and then go on without texts that were cut.

        Args:
            progress: Told of the tokens of the longest text.
        """
        yield from self.turns(progress, goes_on)
        self.leave_out_cut()

    def turns(self, progress: Progress, goes_on: Callable[[Sequence], bool]) -> ForwardCoroutine[None]:
        """A turn of every text that has not ended; again, until there is none of which `goes_on` is true."""
        first = self.texts[0]

        def note(active: Ordered[Sequence]) -> None:
            progress("drawing texts", max(seq.position for seq in active), first.request.max_new_tokens)

        yield from write_on(self.engine, self.texts, self.trace, goes_on, note)

    def leave_out_cut(self) -> None:
        """Go on without texts that were cut because their writer went away, where there are others.

        Without any that is whole, those go on that have begun. Raises the error where none has.
        """
        cut = [seq for seq in self.texts if not seq.complete]
        if not cut:
            return
        whole = [seq for seq in self.texts if seq.complete and seq.finished]
        begun = [seq for seq in cut if seq.generated]
        if not whole and not begun:
            raise cut[0].error or ServerError("a server went away before it wrote anything")
        count("cut", len(cut))
        self.complete, self.texts = False, whole or begun
        warnings.warn(f"{len(cut)} texts were cut, because whoever wrote them went away", stacklevel=2)

    def unjudged(self, error: DecoderyError) -> list[Sequence]:
        """The texts in the order they were drawn, because the judge failed or went away."""
        warnings.warn(f"these texts were not judged: {error}", stacklevel=2)
        if isinstance(error, ServerError):
            count("cut")
        self.complete = False
        return self.texts

    def finish(self, found: list[Sequence]) -> list[Sequence]:
        """`found`, best first, as the results of the search; what else was written counts as discarded."""
        count("discarded", self.trace.ledger.tokens - len(found[0].generated))
        credit(self.trace, found[0])
        for seq in found:
            seq.trace = self.trace
            seq.complete = seq.complete and self.complete
        return found


class Sampled(Search):
    """A search that chooses among n texts which nothing but chance tells apart, once they are written."""

    n: int

    @property
    def resumable(self) -> bool:
        return True

    @abstractmethod
    def decide(self, pool: TextPool) -> ForwardCoroutine[list[Sequence]]:
        """The results, best first, by `pool.finish`."""

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        pool = TextPool(engine, request, self, self.n)
        self.fits(pool.texts[0].request.model)
        yield from pool.write(progress)
        return (yield from self.decide(pool))


def write_on(
    engine: Engine,
    texts: Ordered[Sequence],
    trace: Trace,
    goes_on: Callable[[Sequence], bool],
    note: Callable[[Ordered[Sequence]], None],
) -> ForwardCoroutine[None]:
    """A turn of every text that has not ended; again, until there is none of which `goes_on` is true.

    Args:
        trace: Where the turns are recorded.
        note: Told of the texts that have had a turn.
    """
    recorded = RecordedTexts(texts)
    while active := [seq for seq in texts if not seq.finished and id(seq) not in recorded.ended and goes_on(seq)]:
        waiting = [
            (seq, seq.scheduling.prompt_owner)
            for seq in texts
            if seq.scheduling.prompt_owner is not None and not seq.finished
        ]
        # Who shares a prompt waits for the one that reads it, even where that one would not go on itself.
        ready = [seq for seq in active if seq.scheduling.prompt_owner is None] or [waiting[0][1]]
        yield from engine.write(ready, trace)
        for seq in recorded.growing(ready):
            recorded.note(seq, ended=seq.segment_end is not None and not goes_on(seq))
        for seq, owner in waiting:
            share_prompt(seq, owner)
        note(active)
    for seq in recorded.growing(texts):
        recorded.note(seq, ended=True)


def same_tokens(texts: Ordered[Sequence]) -> list[int]:
    """[n] number of the first text with the same tokens.

    One that has ended is another than one that has not.
    """
    first: dict[Hashable, int] = {}

    def key(seq: Sequence) -> Hashable:
        return identity(seq) if writes(seq.request.model) else (seq.finished, tuple(written(seq)))

    return [first.setdefault(key(seq), number) for number, seq in enumerate(texts)]


def scored(
    scorer: Scorer, texts: Ordered[Sequence], begins: Ordered[int] | None = None
) -> ForwardCoroutine[list[float | None]]:
    """What a scorer says of texts, each of which it is asked about once; None where it fails.

    Raises the scorer's error where it fails for all.

    Args:
        begins: See `Candidates`.
    """
    same = same_tokens(texts)
    distinct = sorted(set(same))
    known = _recorded(scorer, texts, begins, distinct)
    asked = [number for number in distinct if number not in known]
    scores, errors = yield from _tried(scorer, texts, begins, [asked] if asked else [])
    if errors and len(asked) > 1:
        # Whose fault it is shows when each is asked about alone.
        scores, errors = yield from _tried(scorer, texts, begins, [[number] for number in asked])
    scores |= known
    count("scored_tokens", sum(len(written(texts[number])) for number in distinct))
    if not scores:
        raise errors[0]
    leave_out(errors, len(distinct))
    return [scores.get(number) for number in same]


def leave_out(errors: Ordered[Exception], texts: int) -> None:
    """Say that no score came for some of so many texts, if so."""
    if errors:
        count("unscored", len(errors))
        warnings.warn(f"{len(errors)} of {texts} texts are left out, for no score came: {errors[0]}", stacklevel=3)


def _tried(
    scorer: Scorer, texts: Ordered[Sequence], begins: Ordered[int] | None, groups: list[list[int]]
) -> ForwardCoroutine[tuple[dict[int, float], list[Exception]]]:
    """The scores of the texts whose numbers stand in `groups`, and the errors of groups that have none."""
    scores: dict[int, float] = {}
    errors: list[Exception] = []
    for numbers in groups:
        try:
            of_these = None if begins is None else [begins[number] for number in numbers]
            found = yield from _judged(scorer, [texts[number] for number in numbers], of_these)
        except OutOfMemory:
            raise
        except Exception as error:
            errors.append(error)
        else:
            scores |= dict(zip(numbers, found, strict=True))
            if (record := texts[0].request.record) is not None:
                for number, score in zip(numbers, found, strict=True):
                    record.keep_score(scorer, _named(texts[number], begins, number), score)
    return scores, errors


def _recorded(
    scorer: Scorer, texts: Ordered[Sequence], begins: Ordered[int] | None, numbers: list[int]
) -> dict[int, float]:
    """The scores that a record has of some of the texts."""
    if (record := texts[0].request.record) is None:
        return {}
    found = {number: record.score(scorer, _named(texts[number], begins, number)) for number in numbers}
    count("restored_scores", sum(score is not None for score in found.values()))
    return {number: score for number, score in found.items() if score is not None}


def _named(seq: Sequence, begins: Ordered[int] | None, number: int) -> list[object]:
    """What tells a text that was scored from others."""
    prompt = seq.request.conversation.prompt if writes(seq.request.model) and seq.request.conversation else None
    return [prompt, identity(seq), seq.finished, None if begins is None else begins[number]]


def _judged(scorer: Scorer, texts: list[Sequence], begins: list[int] | None) -> ForwardCoroutine[list[float]]:
    hidden: dict[Tap, torch.Tensor] = {}
    if taps := scorer.requirements.taps:
        for seq in texts:
            yield from read_up(seq)
        # Their last tokens are read on forks, as the loop leaves them unread.
        segments = [Segment.chunk([seq.last_token], seq.cache.fork()) for seq in texts]
        rows = yield from score_all(texts[0].request.model, segments, taps)
        hidden = {tap: torch.stack([row.hidden[tap][0] for row in rows]) for tap in taps}
    return (yield from judge(scorer, candidates(texts, hidden, begins))).tolist()


def read_up(seq: Sequence) -> ForwardCoroutine[None]:
    """Let a text's model read all of it but the last token, where its tokens came from a record."""
    while seq.request.record is not None and (missing := unread(seq)) > 1:
        start = seq.cache.next_position
        chunk = seq.tokens[start : start + min(missing - 1, _CHUNK)]
        yield from score_all(seq.request.model, [reading(seq, chunk, [])], (), seq.request.role)
        seq.cache.keep(range(len(chunk)))


def require_count(name: str, setting: str, value: int) -> None:
    """Raise SettingsError for what is no number of texts."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{name} needs {setting} of at least 1, an integer, not {value!r}")


def _drawn_apart(request: Request, number: int) -> Request:
    clone = copy(request)
    clone.seed = nth_seed(request.seed, number)
    return clone
