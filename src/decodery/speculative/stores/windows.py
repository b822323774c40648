"""What followed every earlier occurrence of the end of a text."""

from __future__ import annotations

import numpy as np


class Windows:
    """A growing text, searched from one end to the other. Memory: 8 bytes per token, doubled as it grows."""

    def __init__(self) -> None:
        self._tokens = np.empty(256, dtype=np.int64)
        self._size = 0

    def extend(self, text: list[int]) -> None:
        """Take in what `text` holds beyond the last call."""
        if len(text) > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(len(text), dtype=np.int64)))
        self._tokens[self._size : len(text)] = text[self._size :]
        self._size = len(text)

    def continuations(self, n: int, most: int, length: int) -> np.ndarray:
        """[hits, length] int64 in lexicographic order: what followed the last n tokens before.

        -1 where the text ends. Of more than `most` occurrences the latest count.
        """
        tokens = self._tokens[: self._size]
        last = self._size - n  # where the end itself begins: an occurrence must begin before it
        if last <= 0:
            return np.empty((0, length), dtype=np.int64)
        matches = np.ones(last, dtype=bool)
        for offset in range(n):
            matches &= tokens[offset : offset + last] == tokens[last + offset]
        at = np.flatnonzero(matches)[-most:, None] + np.arange(n, n + length)
        windows = np.where(at < self._size, tokens.take(at, mode="clip"), -1)
        return windows[np.lexsort(windows.T[::-1])]
