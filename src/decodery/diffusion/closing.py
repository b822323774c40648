"""Short completions of a text under a constraint, so that the text ends within the canvas."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

_SHORT = 32
"""Tokens tried per state where a constraint gives no completion: the shortest first, those without letters before."""
_KEPT = 8
"""States kept per position in that search."""
_STEPS = 4_000
"""Tokens tried in one such search, over all positions."""
_RECENT = 8
"""Recent completions that are tried first, whole and without their first tokens."""


class Closing:
    """Finds completions of a text; their length is the upper bound of the room that the text needs.

    Recent completions are tried first, whole and without their first tokens: most states of one text end alike.
    """

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, never: list[int]) -> None:
        """Prepare the search.

        Args:
            constraint: The constraint on the text.
            vocabulary: The vocabulary of its tokens.
            never: Tokens that are not part of a text: end tokens and the mask.
        """
        self._constraint, self._never = constraint, never
        pieces = vocabulary.pieces
        self._short = np.array([10 * len(piece) + piece.isalnum() if piece else 1 << 20 for piece in pieces])
        self._recent: deque[list[int]] = deque(maxlen=_RECENT)

    def find(self, state: Any, most: int, *, thorough: bool = False) -> list[int] | None:
        """Find tokens that complete a text.

        Args:
            state: The constraint's state after the text so far.
            most: Maximum number of tokens.
            thorough: Whether to search longer where the quick search finds no completion that fits.

        Returns:
            At most `most` tokens, an empty list for a complete text; None where no completion was found.
        """
        if self._constraint.is_complete(state):
            return []
        parts = {tuple(each[first:]) for each in self._recent for first in range(len(each))}
        known = next((list(part) for part in sorted(parts, key=len) if self._completes(state, part)), None)
        if known is not None and (len(known) <= most or not thorough):
            # A recent completion counts as the shortest one: the search for another one takes far longer.
            return known if len(known) <= most else None
        found = self._constraint.completion(state)
        if thorough and (found is None or len(found) > most):
            found = self._constraint.completion(state, thorough=True)
        if found is None:
            found = self._tried(state, most)
        if found is not None:
            self._recent.appendleft(found)
        return found if found is not None and len(found) <= most else None

    def _completes(self, state: Any, tokens: tuple[int, ...]) -> bool:
        if not self._constraint.takes(state, tokens):
            return False
        for token in tokens:
            if not self._constraint.accepts(state, token):
                return False
            state = self._constraint.advance(state, token)
        return self._constraint.is_complete(state)

    def _tried(self, state: Any, most: int) -> list[int] | None:
        """Find a completion by trying tokens; of several states that allow the same tokens one is kept."""
        layer: list[tuple[list[int], Any]] = [([], state)]
        looked = 0
        for _ in range(most + 1):
            for tokens, each in layer:
                if self._constraint.is_complete(each):
                    return tokens
            following: dict[bytes, tuple[list[int], Any]] = {}
            for tokens, each in layer:
                free = self._constraint.allowed(each).copy()
                free[self._never] = False
                short = np.flatnonzero(free)[np.argsort(self._short[free], kind="stable")]
                looked += min(len(short), _SHORT)
                for token in short[:_SHORT].tolist():
                    after = self._constraint.advance(each, token)
                    following.setdefault(self._constraint.allowed(after).tobytes(), ([*tokens, token], after))
            layer = list(following.values())[:_KEPT]
            if looked > _STEPS:
                break
        return None
