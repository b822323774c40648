"""Weights of the tokens that follow two others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from decodery.step.drafter_memory import Guarded

_MOST_SUCCESSORS = 64
"""Of a pair's successors, adaptation keeps so many: what it adds must not grow without limit either."""


class Trigrams(Guarded):
    """For pairs of tokens, the tokens seen after them and a weight for each: scores, not probabilities.

    Memory: at most `pairs` pairs, those reinforced longest ago leave first, with up to 64 successors each.
    """

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self._weights: OrderedDict[tuple[int, int], dict[int, float]] = OrderedDict()
        super().__init__()

    def __len__(self) -> int:
        return len(self._weights)

    def successors(self, first: int, second: int) -> list[tuple[int, float]]:
        """Tokens seen after the pair and their weights, in the order they were learned in."""
        with self.lock:
            return list(self._weights.get((first, second), {}).items())

    def load(self, documents: Iterable[np.ndarray], keep: int) -> None:
        """Add a corpus: weights are relative counts within a pair; the `keep` heaviest successors stay."""
        rows = [np.stack((text[:-2], text[1:-1], text[2:]), axis=1) for text in documents if len(text) > 2]
        if not rows:
            return
        trigrams, counts = np.unique(np.concatenate(rows), axis=0, return_counts=True)
        starts = np.flatnonzero(np.r_[True, (trigrams[1:, :2] != trigrams[:-1, :2]).any(axis=1)])
        totals = np.add.reduceat(counts, starts)
        # The commonest pairs last: they are the last to leave.
        for group in np.argsort(totals, kind="stable")[-self.pairs :]:
            start = starts[group]
            end = starts[group + 1] if group + 1 < len(starts) else len(counts)
            heaviest = start + np.argsort(-counts[start:end], kind="stable")[:keep]
            first, second = trigrams[start, :2].tolist()
            weights = (counts[heaviest] / totals[group]).tolist()
            with self.lock:
                self._weights[first, second] = dict(zip(trigrams[heaviest, 2].tolist(), weights, strict=True))
                self._shrink()

    def reinforce(self, window: Sequence[int], increment: float, cap: float) -> None:
        """Add `increment`, up to `cap`, to the weight of every trigram of `window`; unknown ones begin at 0."""
        with self.lock:
            for first, second, third in zip(window, window[1:], window[2:], strict=False):
                found = self._weights.setdefault((first, second), {})
                found[third] = min(found.get(third, 0.0) + increment, cap)
                if len(found) > _MOST_SUCCESSORS:
                    del found[min(found, key=found.__getitem__)]
                self._weights.move_to_end((first, second))
            self._shrink()

    def _shrink(self) -> None:
        while len(self._weights) > self.pairs:
            self._weights.popitem(last=False)
