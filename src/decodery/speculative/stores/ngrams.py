"""Where n-grams of a growing text occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Pick = Literal["last", "first"]


class Occurrences:
    """For every n-gram that something follows, the position right after one of its occurrences.

    Memory: one entry per order and token.

    Args:
        orders: The lengths n, longest first.
        pick: The occurrence to remember.
    """

    def __init__(self, orders: Sequence[int], pick: Pick = "last") -> None:
        self.orders = tuple(orders)
        self._pick = pick
        self._followers: list[dict[tuple[int, ...], int]] = [{} for _ in self.orders]
        self._size = 0

    def extend(self, tokens: list[int]) -> None:
        """Take in what `tokens` has beyond the last call; the text must only have grown."""
        # The n-gram that ends at the last token has no follower yet; leaving it out also excludes self-matches.
        for n, followers in zip(self.orders, self._followers, strict=True):
            for follower in range(max(self._size, n), len(tokens)):
                key = tuple(tokens[follower - n : follower])
                if self._pick == "last":
                    followers[key] = follower
                else:
                    followers.setdefault(key, follower)
        self._size = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Of the longest n-gram that ends `tokens` and occurred before: the position after it, and n."""
        for n, followers in zip(self.orders, self._followers, strict=True):
            if n <= len(tokens) and (start := followers.get(tuple(tokens[-n:]))) is not None:
                return start, n
        return None


def copy(tokens: list[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on.

    Where the text ends the copy goes on into itself, repeating its period.
    """
    copied = tokens[start : start + length]
    period = len(tokens) - start
    while len(copied) < length:
        copied.append(copied[len(copied) - period])
    return copied
