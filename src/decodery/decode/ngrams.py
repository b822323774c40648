"""How often tokens followed each other in texts one has."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered


class NGrams:
    """Counts of what followed every run of 1 to `order` - 1 tokens.

    Memory: at most `order` - 1 entries in each of three kinds of dictionaries per counted token.
    """

    def __init__(self, order: int = 6) -> None:
        self.order = order
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        self._totals: dict[tuple[int, ...], int] = {}

    @classmethod
    def count(cls, texts: Iterable[Ordered[int]], order: int = 6) -> NGrams:
        """Counts over texts given as token ids; runs do not cross from one text into the next."""
        counted = cls(order)
        for text in texts:
            counted.add(text)
        return counted

    def add(self, text: Ordered[int]) -> None:
        """Count one more text."""
        tokens = list(text)
        for at in range(1, len(tokens)):
            for n in range(2, min(self.order, at + 1) + 1):
                run = tuple(tokens[at - n + 1 : at])
                followers = self._followers.setdefault(run, {})
                followers[tokens[at]] = followers.get(tokens[at], 0) + 1
                self._totals[run] = self._totals.get(run, 0) + 1

    def frequency(self, run: Ordered[int], token: int) -> float:
        """How often `token` followed where `run` stood, between 0 and 1; 0 for a run never seen."""
        key = tuple(run)
        return self._followers[key].get(token, 0) / self._totals[key] if key in self._totals else 0.0
