"""Prompt lookup: what followed the last few tokens when they occurred before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..budget.base import Budget
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..errors import SettingsError
from ..registry import register
from .base import Drafter


@dataclass(slots=True)
class _Index:
    """For every n-gram that something follows, the position right after it. `size`: tokens indexed so far."""

    followers: list[dict[tuple[int, ...], int]]
    size: int = 0


@register("prompt-lookup", paper="Prompt Lookup Decoding (2023)", lossless=True)
@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies what followed the longest recent n-gram when it occurred before, in the prompt or in the answer.

    max_ngram: longest suffix looked up; shorter ones are tried after it. length: tokens copied.
    pick: which earlier occurrence to copy from, "last" or "first". A copy that reaches the end of the text goes on
    into itself, so that repetitions of any period are continued. Scope: the request; memory: `max_ngram` dictionary
    entries per token. Source: apoorvumang/prompt-lookup-decoding (2023), which picks the first occurrence.
    """

    max_ngram: int = 3
    length: int = 10
    pick: Literal["last", "first"] = "last"

    def __post_init__(self) -> None:
        if self.max_ngram < 1 or self.length < 1 or self.pick not in ("last", "first"):
            raise SettingsError("prompt-lookup needs max_ngram >= 1, length >= 1 and pick 'last' or 'first'")

    def start(self, seq: Sequence) -> _Index:
        return _Index([{} for _ in range(self.max_ngram)])

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        tokens, index = seq.tokens, seq.draft_state
        self._update(index, tokens)
        length = min(self.length, budget.nodes, budget.depth)
        for n in range(min(self.max_ngram, len(tokens)), 0, -1):
            start = index.followers[n - 1].get(tuple(tokens[-n:]))
            if start is not None:
                return TokenTree.chain(seq.pending, _copy(tokens, start, length))
        return TokenTree.root(seq.pending)

    def _update(self, index: _Index, tokens: list[int]) -> None:
        # The n-gram that ends at the last token has no follower yet; leaving it out also excludes self-matches.
        for follower in range(max(index.size, 1), len(tokens)):
            for n in range(1, min(self.max_ngram, follower) + 1):
                key = tuple(tokens[follower - n : follower])
                if self.pick == "first":
                    index.followers[n - 1].setdefault(key, follower)
                else:
                    index.followers[n - 1][key] = follower
        index.size = len(tokens)


def _copy(tokens: list[int], start: int, length: int) -> list[int]:
    copied = tokens[start : start + length]
    period = len(tokens) - start
    while len(copied) < length:
        copied.append(copied[len(copied) - period])
    return copied
