"""How a text that a constraint has begun can be brought to its end in few tokens."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

_SHORT = 32
"""Tokens of a place that are tried where a constraint does not know its completions: the shortest, no letters first."""
_KEPT = 8
"""States of a place that are kept there."""
_STEPS = 4_000
"""States that are looked at there in all."""
_RECENT = 8
"""Completions that are tried again, and parts of them, before others are looked for."""


class Closing:
    """Finds completions, each of which is a bound: a text from there fits wherever it does.

    What has been found is tried again first, as it is and without its first tokens, since most states of one text end
    alike.
    """

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, never: list[int]) -> None:
        """What a constraint allows in a canvas that has to end.

        Args:
            constraint: What the text is held to.
            vocabulary: The tokens that it decides about.
            never: Those that are no part of a text: ends, and the mask.
        """
        self._constraint, self._never = constraint, never
        pieces = vocabulary.pieces
        self._short = np.array([10 * len(piece) + piece.isalnum() if piece else 1 << 20 for piece in pieces])
        self._recent: deque[list[int]] = deque(maxlen=_RECENT)

    def find(self, state: Any, most: int, *, thorough: bool = False) -> list[int] | None:
        """Tokens that complete a text.

        Args:
            state: Where it stands.
            most: How many tokens there is room for.
            thorough: Whether to look far, where nothing that is found at once fits.

        Returns:
            At most so many tokens, none for a complete text; None where none were found.
        """
        if self._constraint.is_complete(state):
            return []
        parts = {tuple(each[first:]) for each in self._recent for first in range(len(each))}
        known = next((list(part) for part in sorted(parts, key=len) if self._completes(state, part)), None)
        if known is not None and (len(known) <= most or not thorough):
            # What is known to complete it is taken for the shortest one: to look for another takes far longer.
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
        """The same by trying tokens, of states that allow the same ones one."""
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
