"""Constraint to one of several given texts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.registry import register
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

from .base import ConstraintSpec, Mode, require_text
from .spelling import end_mask, sorted_pieces, spelled

_AHEAD = 256
"""Bytes of forced text that are tokenized to find its next token."""


@register("choice", guarantee="every finished text is one of the options", texts=("options",))
@dataclass(frozen=True)
class Choice(ConstraintSpec):
    """Writes one of several given texts.

    Attributes:
        options: One or more texts, none of them empty. As text: choice:options=yes/no. There may be thousands: a state
            is a range of the sorted options, and options outside it cost no time.
    """

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        options = (self.options,) if isinstance(self.options, str) else tuple(self.options)
        if not options or not all(isinstance(option, str) and option for option in options):
            raise SettingsError("choice needs at least one option, and every option must be a text that is not empty")
        object.__setattr__(self, "options", options)

    def compile(self, vocabulary: Vocabulary) -> ChoiceConstraint:
        require_text("list of options", "".join(self.options))
        return ChoiceConstraint(vocabulary, self.options, self.mode)


class ChoiceState:
    """State of a text: the first `length` bytes of the sorted options `low` to `high` (exclusive).

    Args:
        ended: Whether the text was complete before its end token, None before one.
        broken: Whether the text is not a prefix of any option.
        mask: [vocab] bool, after it was computed.
    """

    __slots__ = ("broken", "ended", "high", "length", "low", "mask")

    def __init__(self, low: int, high: int, length: int, *, ended: bool | None = None, broken: bool = False) -> None:
        self.low = low
        self.high = high
        self.length = length
        self.ended = ended
        self.broken = broken
        self.mask: np.ndarray | None = None


class ChoiceConstraint(Constraint):
    """A `Choice` over a model's tokens.

    If no token can write the next byte, `allowed` raises an error.
    """

    stops = True

    def __init__(self, vocabulary: Vocabulary, options: Sequence[str], mode: Mode) -> None:
        self.vocabulary = vocabulary
        self._mode = mode
        self._options = sorted({option.encode() for option in options})
        self._ends = end_mask(vocabulary)
        self._pieces, self._ids = sorted_pieces(vocabulary)
        self._first: np.ndarray | None = None

    def init(self, prompt: Sequence[int]) -> ChoiceState:
        state = ChoiceState(0, len(self._options), 0)
        # The initial state has the widest range; its mask is computed once, not once per text.
        self._first = state.mask = self._computed(state) if self._first is None else self._first
        return state

    def allowed(self, state: ChoiceState) -> np.ndarray:
        if state.mask is None:
            state.mask = self._ends if state.broken or state.ended is not None else self._computed(state)
        return state.mask

    def advance(self, state: ChoiceState, token: int) -> ChoiceState:
        if token in self.vocabulary.eos_ids:
            return ChoiceState(state.low, state.high, state.length, ended=self.is_complete(state))
        piece = self.vocabulary.pieces[token]
        if state.broken or state.ended is not None or not piece or token in self.vocabulary.special_ids:
            return ChoiceState(0, 0, 0, broken=True)
        span = slice(state.length, state.length + len(piece))
        low = bisect_left(self._options, piece, state.low, state.high, key=itemgetter(span))
        high = bisect_right(self._options, piece, low, state.high, key=itemgetter(span))
        return ChoiceState(low, high, span.stop, broken=low == high)

    def is_complete(self, state: ChoiceState) -> bool:
        if state.broken or state.ended is not None:
            return bool(state.ended)
        return len(self._options[state.low]) == state.length

    def permits(self, state: ChoiceState, token: int) -> bool:
        following = self.advance(state, token)
        return not following.broken if following.ended is None else bool(self.allowed(state)[token])

    def _computed(self, state: ChoiceState) -> np.ndarray:
        mask = np.zeros(self.vocabulary.size, dtype=bool)
        token = self._canonical(state) if self._mode == "canonical" else None
        if token is None:
            mask[[self._ids[at] for at in self._fitting(state)]] = True
        else:
            mask[token] = True
        if self.is_complete(state):
            mask |= self._ends
        if not mask.any():
            rest = self._options[state.low][state.length :].decode("utf-8", "replace")
            raise ConstraintError(f"no token of the model can write {rest[:40]!r}: leave that option out")
        mask.flags.writeable = False
        return mask

    def _fitting(self, state: ChoiceState) -> Iterator[int]:
        """Indices, in the sorted pieces, of those that are a prefix of what may follow.

        Both sorted lists are searched together, byte by byte, while they agree.
        """
        options, pieces = self._options, self._pieces
        below = [(0, state.low, state.high, 0, len(pieces))]
        while below:
            depth, low, high, first, last = below.pop()
            at, of = itemgetter(state.length + depth), itemgetter(depth)
            low += len(options[low]) == state.length + depth
            while low < high and first < last:
                byte = at(options[low])
                above = bisect_right(options, byte, low, high, key=at)
                first = bisect_left(pieces, byte, first, last, key=of)
                end = bisect_right(pieces, byte, first, last, key=of)
                while first < end and len(pieces[first]) == depth + 1:
                    yield first
                    first += 1
                if first < end:
                    below.append((depth + 1, low, above, first, end))
                low, first = above, end

    def _canonical(self, state: ChoiceState) -> int | None:
        """The tokenizer's next token of the forced text; None where it is uncertain, or no text is forced."""
        span = slice(state.length, state.length + _AHEAD)
        forced = _common(self._options[state.low][span], self._options[state.high - 1][span])
        # The forced bytes may end within a character, and a token may end within the first one.
        text = forced.decode("utf-8", "ignore")
        tokens = spelled(text, self.vocabulary) if text and forced.startswith(text.encode()) else []
        if not tokens or self.vocabulary.bytes_of(tokens) != text.encode():
            return None
        alone = state.high == state.low + 1
        sure = alone or len(self.vocabulary.pieces[tokens[0]]) <= self._settled(state, len(forced))
        return tokens[0] if sure else None

    def _settled(self, state: ChoiceState, forced: int) -> int:
        """Number of forced bytes before any token that may include text after them, which has no canonical split."""
        for begin in range(forced):
            at = ChoiceState(state.low, state.high, state.length + begin)
            if any(len(self._pieces[place]) > forced - begin for place in self._fitting(at)):
                return begin
        return forced


def _common(first: bytes, second: bytes) -> bytes:
    """The common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((at for at, (one, other) in pairs if one != other), len(second))]
