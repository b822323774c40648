"""The most likely tokens after the last one, two or three tokens, as the model ranked them when they last stood so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decodery.core.copied_pages import CopiedPages
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Guarded

_BITS = 17  # as in csrc/expect.cpp
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Contexts(Guarded):
    """Per order n a table from the n last tokens to the tokens the model ranked highest after them.

    A table has 2^17 places; where two contexts fall on one, the later one has it. Memory: 2^17 * (8 + 4 * width) bytes
    per order at most; pages of it are taken when they are first written, whatever the store begins with.

    Args:
        orders: The lengths n, longest first.
        width: Tokens kept per context, no more than there are.
        begins: The `pages` of a store of the same kind, whose content this one begins with.
    """

    def __init__(self, orders: Sequence[int], width: int, begins: CopiedPages | None = None) -> None:
        self.orders, self.width = tuple(orders), width
        self.longest = self.orders[0]
        places = len(self.orders) << _BITS
        self.pages = CopiedPages(4 * places * (2 + width)) if begins is None else begins.copy()
        keys = self.pages.bytes[: 8 * places].view(np.uint64).reshape(len(self.orders), -1)
        rows = self.pages.bytes[8 * places :].view(np.int32).reshape(len(self.orders), -1)
        # Steps look up and learn a handful of contexts: single places of memory are many times faster at that than
        # array operations.
        self._keys = [each.data for each in keys]
        self._rows = [each.data for each in rows]
        super().__init__()

    def addresses(self) -> tuple[list[int], list[int]]:
        """Per order where its keys and its rows stand in memory, for native calls.

        As long as this object lives.
        """
        keys, rows = ([np.asarray(each).ctypes.data for each in tables] for tables in (self._keys, self._rows))
        return keys, rows

    def rows(self, context: Sequence[int]) -> list[list[int] | None]:
        """Per order the tokens that may follow `context`, best first; None where it never stood so."""
        found: list[list[int] | None] = [None] * len(self.orders)
        hashes, width = _hashes(context, self.longest), self.width
        for number, order in enumerate(self.orders):
            if order < len(hashes):
                place = (key := hashes[order]) >> (64 - _BITS)
                if self._keys[number][place] == key:
                    found[number] = self._rows[number][place * width : (place + 1) * width].tolist()
        return found

    def learn(self, text: Sequence[int], seen: VerificationFeedback) -> None:
        """Take over what the model ranked highest at every scored row, rejected ones too.

        Accepted rows count last.

        Args:
            text: All tokens of the sequence; the tree's root stands at `seen.start` in it.
        """
        ids, _ = seen.best(self.width)
        ranked = ids.astype(np.int32).reshape(-1).data
        contexts: list[list[int]] = []
        for token, parent in zip(seen.tree.tokens.tolist(), seen.tree.parents.tolist(), strict=True):
            before = contexts[parent] if contexts else text[max(0, seen.start + 1 - self.longest) : seen.start]
            contexts.append([*before[len(before) + 1 - self.longest if len(before) >= self.longest else 0 :], token])
        with self.lock:
            for node in (*range(len(contexts)), 0, *seen.path):
                self._put(contexts[node], ranked[node * ids.shape[1] : (node + 1) * ids.shape[1]])

    def fill(self, order: int, contexts: np.ndarray, rows: np.ndarray) -> None:
        """Take over many contexts [m, order] of one order and the tokens after them [m, width].

        First ones win.
        """
        number, keys = self.orders.index(order), np.zeros(len(contexts), dtype=np.uint64)
        for column in contexts.T[::-1]:
            keys = (keys + (column + 1).astype(np.uint64)) * np.uint64(_MIX)
        places = (keys >> np.uint64(64 - _BITS)).astype(np.int64)
        places, first = np.unique(places, return_index=True)
        with self.lock:
            np.asarray(self._keys[number])[places] = keys[first]
            kept = np.full((len(first), self.width), -1, dtype=np.int32)
            kept[:, : rows.shape[1]] = rows[first, : self.width]
            np.asarray(self._rows[number]).reshape(-1, self.width)[places] = kept

    def _put(self, context: list[int], row: memoryview) -> None:
        hashes = _hashes(context, self.longest)
        for number, order in enumerate(self.orders):
            if order < len(hashes):
                place = (key := hashes[order]) >> (64 - _BITS)
                self._keys[number][place] = key
                self._rows[number][place * self.width : (place + 1) * self.width] = row


def _hashes(context: Sequence[int], longest: int) -> list[int]:
    """Keys of the last 0, 1, 2, ... `longest` tokens of `context`, as far as it goes."""
    hashes, key = [0], 0
    for token in context[: -longest - 1 : -1]:
        key = ((key + token + 1) * _MIX) & _MASK
        hashes.append(key)
    return hashes
