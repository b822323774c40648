"""What earlier texts said after the same few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from decodery.core.native.kernels import library
from decodery.step.drafter_memory import Guarded

from .native_ngrams import NativeNgrams
from .ngrams import Occurrences

_END = -1
"""Between two texts; no token is."""


class PastTexts(Guarded):
    """Earlier texts, and where their n-grams stood in them last.

    Args:
        orders: The lengths n, longest first.
        most: Tokens that are kept at most; where they are too many, the older half leaves.
    """

    def __init__(self, orders: Sequence[int], most: int = 1 << 15) -> None:
        super().__init__()
        self.orders, self.most = tuple(orders), most
        self._tokens: list[int] = []
        self._places = Occurrences(self.orders)
        self._native: NativeNgrams | None = None

    @property
    def tokens(self) -> list[int]:
        """Those of all texts, with a mark after each."""
        with self.lock:
            return list(self._tokens)

    def add(self, text: Sequence[int]) -> None:
        """Keep a text that has ended."""
        with self.lock:
            self._tokens += [*text[-self.most // 2 :], _END]
            if len(self._tokens) > self.most:
                self._tokens = self._tokens[-self.most // 2 :]
                self._places = Occurrences(self.orders)
                if self._native is not None:
                    self._native.clear()

    def restore(self, tokens: Sequence[int]) -> None:
        """Begin with the `tokens` of another one."""
        with self.lock:
            self._tokens = list(tokens)

    def native(self) -> int | None:
        """Where the n-grams stand, for native calls while this object lives; None without texts."""
        if not self._tokens or library() is None:
            return None
        with self.lock:
            if self._native is None:
                self._native = NativeNgrams(self.orders)
            if self._native.size < len(self._tokens):
                self._native.extend(self._tokens[self._native.size :])
            return self._native.handle

    def after(self, text: Sequence[int], length: int, most: int) -> tuple[list[int], int]:
        """Up to `length` tokens that followed the end of `text` in an earlier one, and the match length.

        Nothing, and 0, where none of its n-grams did.

        Args:
            most: Tokens of it that are compared.
        """
        with self.lock:
            tokens = self._tokens
            self._places.extend(tokens)
            if (found := self._places.find(text)) is None:
                return [], 0
            start, repeated = found[0], 0
            while repeated < min(start, most, len(text)) and tokens[start - 1 - repeated] == text[-1 - repeated]:
                repeated += 1
            copied = tokens[start : start + length]
            return (copied[: copied.index(_END)] if _END in copied else copied), repeated
