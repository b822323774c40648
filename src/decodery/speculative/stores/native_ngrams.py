"""Where the n-grams of a growing text stood last, for native calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decodery.core.native.kernels import library

from .ngrams import Pick


class NativeNgrams:
    """What `Occurrences` is in Python. A copy is empty until it holds a text.

    Args:
        orders: The lengths n, longest first.
        pick: The occurrence to remember.
    """

    def __init__(self, orders: Sequence[int], pick: Pick = "last") -> None:
        lib = library()
        assert lib is not None
        self._lib, self._orders, self._pick = lib, tuple(orders), pick
        lengths = np.array(self._orders, dtype=np.int32)
        self.handle: int = lib.decodery_ngrams(lengths.ctypes.data, len(lengths), pick == "first")
        """Its address, for native calls, as long as this object lives."""

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._lib.decodery_ngrams_free(self.handle)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeNgrams:
        return NativeNgrams(self._orders, self._pick)

    @property
    def size(self) -> int:
        """How many tokens it holds."""
        return int(self._lib.decodery_ngrams_size(self.handle))

    def clear(self) -> None:
        self._lib.decodery_ngrams_clear(self.handle)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on by these tokens."""
        more = np.array(tokens, dtype=np.int64)
        self._lib.decodery_ngrams_extend(self.handle, more.ctypes.data, len(more))

    def hold(self, text: Sequence[int]) -> None:
        """Hold just this text, of which it may hold the beginning: where it holds more, it begins anew."""
        size = self.size
        if size >= len(text):
            self.clear()
            size = 0
        self.extend(text[size:])
