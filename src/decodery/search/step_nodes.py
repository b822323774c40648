"""Texts that stand at the ends of steps: what they are worth, where steps end, and which are drawn from again."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import partial
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.worker_pool import NotStarted, Unanswered
from decodery.step.scorer import Scorer
from decodery.step.segment_end import SegmentEnd
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .answers import patterns

_MOST_PATTERN = 1000
_PATTERN_SECONDS = 1.0
"""Of work that a pattern may take for one step's text."""

Aggregate = Literal["last", "min", "prod", "mean"]


@dataclass(eq=False, slots=True)
class Node:
    """A text that stands at the end of a step, or of itself.

    Attributes:
        begin: How many tokens, prompt included, stand before its last step.
        number: Of that step in the trace's `grown`, -1 where nothing is written.
        scores: Of its steps so far, in order.
        children: How many continuations have been begun.
        judged: Whether that of the last one is among them.
        only: The one there is where the sampler draws nothing.
    """

    seq: Sequence
    begin: int
    number: int = -1
    scores: tuple[float, ...] = ()
    depth: int = 0
    children: int = 0
    judged: bool = False
    only: Node | None = None

    @property
    def finished(self) -> bool:
        return self.seq.finished


def aggregated(how: Aggregate, scores: Ordered[float], scorer: Scorer) -> float:
    """One number for the scores of a text's steps; -inf for none.

    "prod" is the sum where scores are logarithms.
    """
    if not scores:
        return -math.inf
    if how == "last":
        return scores[-1]
    if how == "min":
        return min(scores)
    if how == "mean":
        return math.fsum(scores) / len(scores)
    return math.fsum(scores) if scorer.log else math.prod(scores)


class StepEnd(SegmentEnd):
    """Whether a text that goes on from where `seq` stands has come to the end of a step.

    Args:
        delimiter: A text, or token ids; None where only the length counts.
        most: Tokens of a step.
        pattern: A regular expression that ends a step where it matches; "" for none.
        seconds: Of a step at most; None for any time.
    """

    def __init__(
        self,
        seq: Sequence,
        delimiter: str | tuple[int, ...] | None,
        most: int,
        pattern: str = "",
        seconds: float | None = None,
    ) -> None:
        self._pattern = pattern
        self._until = None if seconds is None else time.monotonic() + seconds
        self._delimiter = delimiter
        self._most = most
        self._tokens = len(seq.tokens)
        self._characters = 0 if seq.text is None else len(seq.text.text)
        self._asked: tuple[str, bool] | None = None

    @property
    def asks(self) -> bool:
        return bool(self._pattern)

    def question(self, seq: Sequence) -> Callable[[], object] | None:
        if not self._pattern or seq.text is None:
            return None
        piece = seq.text.text[self._characters :]
        return None if self._asked is not None and self._asked[0] == piece else partial(self._ask, piece)

    def _ask(self, piece: str) -> bool:
        """Whether the pattern matches; the answer for the latest piece is kept."""
        self._asked = piece, _matches(self._pattern, piece)
        return self._asked[1]

    def __call__(self, seq: Sequence) -> bool:
        if len(seq.tokens) - self._tokens >= self._most:
            return True
        if self._until is not None and time.monotonic() > self._until:
            return True
        if (question := self.question(seq)) is not None:
            question()
        if self._asked is not None and self._asked[1]:
            return True
        if self._delimiter is None:
            return False
        if isinstance(self._delimiter, str):
            assert seq.text is not None
            return self._in_text(seq.text.text[self._characters :], self._delimiter)
        ids = list(self._delimiter)
        written = seq.tokens[self._tokens :]
        return written[-len(ids) :] == ids and bool(set(written) - set(ids))

    @staticmethod
    def _in_text(piece: str, delimiter: str) -> bool:
        """Whether it stands in a piece of text, and something before it."""
        at = piece.find(delimiter)
        while at >= 0:
            if piece[:at].replace(delimiter, "").strip():
                return True
            at = piece.find(delimiter, at + 1)
        return False


def require_pattern(pattern: str) -> None:
    """Raise SettingsError for what is no regular expression of the end of a step."""
    if len(pattern) > _MOST_PATTERN:
        raise SettingsError(f"step_pattern has at most {_MOST_PATTERN} characters, not {len(pattern)}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(f"step_pattern {pattern!r} is no regular expression: {error}") from error


def _matches(pattern: str, text: str) -> bool:
    try:
        (found,) = patterns.ask([pattern, [text], True], _PATTERN_SECONDS)
    except (NotStarted, Unanswered) as error:
        raise SettingsError(f"step_pattern {pattern!r} cannot be used here: {error}; simplify it") from error
    return found is not None


def identity(seq: Sequence) -> Hashable:
    """What equal texts have in common: their tokens, or what they say where a server cuts them."""
    if writes(seq.request.model) and seq.text is not None:
        return seq.finished, seq.text.text
    return tuple(seq.tokens)


def distinct(nodes: Iterable[Node]) -> list[Node]:
    """Of nodes with equal texts the first."""
    first: dict[Hashable, Node] = {}
    for node in nodes:
        first.setdefault(identity(node.seq), node)
    return list(first.values())


def widens(power: float | None, visits: int, draws: int) -> bool:
    """Whether a text is drawn from again after so many visits and draws, by visits ** power."""
    return power is not None and visits**power >= draws + 1


def require_widening(name: str, power: float | None) -> None:
    """Raise SettingsError for what is no power of visits."""
    if power is not None and not 0 < power <= 1:
        raise SettingsError(f"the widening of {name} is a power above 0 and up to 1, or None, not {power!r}")
