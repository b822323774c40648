"""Token counts of a text, and earlier occurrences of its end, both updated token by token.

Both are immutable: adding a token makes a new value, so that every node of a tree can have its own. They share the data
of the common prefix; only the last tokens are in a short tail, which is merged into it from time to time. So the cost
of adding a token hardly depends on the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

_TAIL = 64
"""Maximum length of the tail."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token occurs.

    Attributes:
        ids: [m] int64, ascending, without `tail`.
        counts: [m] int64, without `tail`.
        tail: The last tokens, which are not in `ids` and `counts` yet.
    """

    ids: np.ndarray
    counts: np.ndarray
    tail: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int]) -> TokenCounts:
        ids, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        return cls(ids, counts)

    def add(self, token: int) -> TokenCounts:
        tail = (*self.tail, token)
        return replace(self, tail=tail) if len(tail) <= _TAIL else self._fold(tail)

    def _fold(self, tail: tuple[int, ...]) -> TokenCounts:
        ids, places = np.unique(np.concatenate([self.ids, tail]), return_inverse=True)
        weights = np.concatenate([self.counts, np.ones(len(tail), dtype=np.int64)])
        counts = np.zeros(len(ids), dtype=np.int64)
        np.add.at(counts, places, weights)
        return TokenCounts(ids, counts)


def token_counts(histories: Sequence[TokenCounts], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [m] of the tokens in any of the histories, and their counts [n, m] float32 in each.

    Ids without a logit are left out.
    """
    bases = {id(each.ids): each for each in histories}
    tails = np.array([token for each in histories for token in each.tail], dtype=np.int64)
    ids = np.unique(np.concatenate([*(base.ids for base in bases.values()), tails]))
    ids = ids[: ids.searchsorted(vocab_size)]
    # Ids beyond the vocabulary are counted in one extra column.
    counts = np.zeros((len(histories), len(ids) + 1), dtype=np.float32)
    places = {key: ids.searchsorted(base.ids) for key, base in bases.items()}
    for row, each in enumerate(histories):
        counts[row, places[id(each.ids)]] = each.counts
    rows = np.repeat(np.arange(len(histories)), [len(each.tail) for each in histories])
    np.add.at(counts, (rows, ids.searchsorted(tails)), 1)
    return ids, counts[:, :-1]


def _nowhere() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Repeats:
    """Earlier occurrences of the last tokens of a text.

    The cost of adding a token grows with its number of occurrences.

    Attributes:
        text: [n] int64, without `tail`.
        places: Positions of each of its tokens, ascending, without `tail`.
        tail: The last tokens, which are not in `text` yet.
        ends: [r] earlier positions of the last token, ascending.
        lengths: [r] number of tokens up to there that equal the end of the text.
    """

    text: np.ndarray
    places: dict[int, np.ndarray]
    tail: tuple[int, ...] = ()
    ends: np.ndarray = field(default_factory=_nowhere)
    lengths: np.ndarray = field(default_factory=_nowhere)

    @classmethod
    def of(cls, tokens: Sequence[int], most: int | None = None) -> Repeats:
        """The repetitions at the end of a text.

        Args:
            tokens: The text.
            most: Maximum length of a repetition; longer ones count as this long.
        """
        text = np.array(tokens, dtype=np.int64)
        order = text.argsort(kind="stable")
        ids, starts = np.unique(text[order], return_index=True)
        places = dict(zip(ids.tolist(), np.split(order, starts[1:]), strict=False))
        if not len(text):
            return cls(text, places)
        ends = places[int(text[-1])][:-1]
        lengths = np.array(_suffix_lengths(text.tolist()), dtype=np.int64)[ends]
        found = cls(text, places, (), ends, lengths)
        return found if most is None else found._cut(np.minimum(lengths, most))

    def __len__(self) -> int:
        return len(self.text) + len(self.tail)

    def add(self, token: int) -> Repeats:
        base = self if len(self.tail) < _TAIL else self._fold()
        ends = base._positions(token)
        lengths = np.ones(len(ends), dtype=np.int64)
        if len(self.ends) and len(ends):
            slots = self.ends.searchsorted(ends - 1).clip(max=len(self.ends) - 1)
            lengths += np.where(self.ends[slots] == ends - 1, self.lengths[slots], 0)
        return Repeats(base.text, base.places, (*base.tail, token), ends, lengths)

    def broken(self) -> Repeats:
        """The same text without its current repetitions; later ones start at the next token."""
        return replace(self, ends=_nowhere(), lengths=_nowhere())

    def within(self, window: int) -> Repeats:
        """The repetitions that lie within the last `window` tokens."""
        return self._cut(np.minimum(self.lengths, self.ends - (len(self) - window) + 1))

    def followers(self, least: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [f], ascending, that followed a repetition of at least `least` tokens, and its length [f]."""
        long = self.lengths >= least
        if not long.any():
            return _nowhere(), _nowhere()
        tokens, places = np.unique(self._at(self.ends[long] + 1), return_inverse=True)
        longest = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.at(longest, places, self.lengths[long])
        return tokens, longest

    def occurs(self, token: int) -> bool:
        return token in self.places or token in self.tail

    def tokens(self) -> np.ndarray:
        """Every token that occurs."""
        return np.array([*self.places, *self.tail], dtype=np.int64)

    def _cut(self, lengths: np.ndarray) -> Repeats:
        """Replace the lengths, and drop entries with lengths of 0 or less."""
        return replace(self, ends=self.ends[lengths > 0], lengths=lengths[lengths > 0])

    def _positions(self, token: int) -> np.ndarray:
        known = self.places.get(token, _nowhere())
        recent = [len(self.text) + at for at, each in enumerate(self.tail) if each == token]
        return np.concatenate([known, recent]).astype(np.int64) if recent else known

    def _at(self, positions: np.ndarray) -> np.ndarray:
        recent = positions >= len(self.text)
        if not recent.any():
            return self.text[positions]
        tokens = np.empty(len(positions), dtype=np.int64)
        tokens[~recent] = self.text[positions[~recent]]
        tokens[recent] = np.array(self.tail, dtype=np.int64)[positions[recent] - len(self.text)]
        return tokens

    def _fold(self) -> Repeats:
        places = self.places | {token: self._positions(token) for token in set(self.tail)}
        text = np.concatenate([self.text, np.array(self.tail, dtype=np.int64)])
        return Repeats(text, places, (), self.ends, self.lengths)


def _suffix_lengths(tokens: list[int]) -> list[int]:
    """For every position, the number of tokens up to it that equal the end of the text: the Z algorithm, reversed."""
    backwards = tokens[::-1]
    n = len(backwards)
    lengths = [n] + [0] * (n - 1)
    left = right = 0
    for at in range(1, n):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < n and backwards[length] == backwards[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths[::-1]
