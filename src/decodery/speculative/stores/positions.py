"""Where n-grams of a text begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


class Positions:
    """For every n-gram of a growing text that something follows, its first or last position.

    Memory: one dictionary entry per token of the text.
    """

    def __init__(self, length: int, pick: Literal["first", "last"]) -> None:
        self.length = length
        self.pick = pick
        self.starts: dict[tuple[int, ...], int] = {}
        self._size = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens`, the whole text, holds beyond the last call."""
        # The n-gram at the very end has no follower yet; leaving it out also excludes self-matches.
        for start in range(max(self._size - self.length, 0), len(tokens) - self.length):
            key = tuple(tokens[start : start + self.length])
            if self.pick == "first":
                self.starts.setdefault(key, start)
            else:
                self.starts[key] = start
        self._size = len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the last n-gram of the text stood before, None if nowhere."""
        return self.starts.get(tuple(tokens[-self.length :])) if len(tokens) >= self.length else None
