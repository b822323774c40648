"""The likeliest tokens after the last one, two or three tokens, as the model ranked them when they last stood so."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

from ...core.topk import topk
from ..base import Observation

_BITS = 17
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Contexts:
    """Per order n a table from the n last tokens to the tokens the model ranked highest behind them.

    orders: the lengths n, longest first. A table has 2^17 places; where two contexts fall on one, the later one has it.
    Memory: 2^17 * (8 + 4 * width) bytes per order, whatever happens.
    """

    def __init__(self, orders: Sequence[int], width: int) -> None:
        self.orders, self.width = tuple(orders), width
        self._keys = np.zeros((len(self.orders), 1 << _BITS), dtype=np.uint64)
        self._rows = np.full((len(self.orders), 1 << _BITS, width), -1, dtype=np.int32)
        self._lock = Lock()

    def rows(self, context: Sequence[int]) -> list[list[int] | None]:
        """Per order the tokens that may follow `context`, best first; None where it never stood so."""
        found: list[list[int] | None] = []
        key, keys = 0, {}
        for length, token in enumerate(reversed(context[-self.orders[0] :]), start=1):
            key = ((key + token + 1) * _MIX) & _MASK
            keys[length] = key
        for number, order in enumerate(self.orders):
            wanted = keys.get(order)
            place = 0 if wanted is None else wanted >> (64 - _BITS)
            known = wanted is not None and self._keys[number, place] == wanted
            found.append(self._rows[number, place].tolist() if known else None)
        return found

    def learn(self, text: Sequence[int], seen: Observation) -> None:
        """Take over what the model ranked highest at every scored row, rejected ones too; accepted rows count last.

        text: all tokens of the sequence; the tree's root stands at `seen.start` in it.
        """
        ids, _ = topk(seen.logits, self.width)
        before = self.orders[0] - 1
        last = [-1] * before + list(text[max(0, seen.start - before) : seen.start])
        # The tokens before the root stand as its ancestors, so that all nodes are walked up alike.
        tokens = np.concatenate((last[len(last) - before :], seen.tree.tokens)).astype(np.int64)
        parents = np.concatenate((np.arange(-1, before - 1), seen.tree.parents + before))
        parents[before] = before - 1
        nodes = np.concatenate((np.arange(len(seen.tree)), [0], np.asarray(seen.path, dtype=np.int64)))
        at, key = nodes + before, np.zeros(len(nodes), dtype=np.uint64)
        keys = {}
        for length in range(1, before + 2):
            key = (key + (tokens[at] + 1).astype(np.uint64)) * np.uint64(_MIX)
            keys[length] = key, tokens[at] >= 0
            at = parents[at]
        with self._lock:
            for number, order in enumerate(self.orders):
                key, whole = keys[order]
                places = (key[whole] >> np.uint64(64 - _BITS)).astype(np.int64)
                self._keys[number, places] = key[whole]
                self._rows[number, places, : ids.shape[1]] = ids[nodes[whole]]
