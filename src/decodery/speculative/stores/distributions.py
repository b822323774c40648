"""Mean next-token distributions by context."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from decodery.core.topk import logsumexp, topk
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Guarded

Context = tuple[int, ...]


class MeanDistributions(Guarded):
    """Running means of the distributions after short contexts, cut to their largest entries.

    Memory: at most `contexts` contexts of 8 * width + 8 bytes and a dictionary entry; those not met for longest leave.
    """

    def __init__(self, width: int, contexts: int) -> None:
        self.width = width
        self.contexts = contexts
        self._slots: OrderedDict[Context, int] = OrderedDict()
        self._ids = np.full((64, width), -1, dtype=np.int32)
        self._weights = np.zeros((64, width), dtype=np.float32)
        self._counts = np.zeros(64, dtype=np.int64)
        super().__init__()

    def __len__(self) -> int:
        return len(self._slots)

    def longest(self, contexts: Sequence[Context], orders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids [n, width] int32 (-1: none) and weights [n, width] float32 of the first known of `orders`."""
        with self.lock:
            get = self._slots.get
            slots = np.array([_first(get, context, orders) for context in contexts], dtype=np.int64)
            ids, weights = self._ids[slots], self._weights[slots]
        ids[slots < 0], weights[slots < 0] = -1, 0.0
        return ids, weights

    def learn(self, contexts: Sequence[Context], ids: np.ndarray, probabilities: np.ndarray) -> None:
        """Average in one distribution per context, in order.

        Args:
            ids, probabilities: [n, width]; id -1 for none.
        """
        for start in range(0, len(contexts), self.contexts):  # so that none leaves that has just come
            end = start + self.contexts
            self._learn(contexts[start:end], ids[start:end], probabilities[start:end])

    def observe(self, text: list[int], seen: VerificationFeedback, orders: Sequence[int]) -> None:
        """Average in the model's distribution at every scored row, rejected ones too, for these lengths.

        Args:
            text: The sequence's tokens, of which `seen.start` come before the scored tree.
        """
        ids, values = topk(seen.logits, self.width)
        probabilities = np.exp(values - logsumexp(seen.logits, values[:, 0])[:, None])
        if ids.shape[1] < self.width:
            missing = ((0, 0), (0, self.width - ids.shape[1]))
            ids, probabilities = np.pad(ids, missing, constant_values=-1), np.pad(probabilities, missing)
        longest = max(orders)
        endings: list[Context] = []
        for token, parent in zip(seen.tree.tokens.tolist(), seen.tree.parents.tolist(), strict=True):
            before = endings[parent] if parent >= 0 else tuple(text[max(0, seen.start - longest) : seen.start])
            endings.append((*before, token)[-longest:])
        pairs = [
            (ending[-order:], row) for row, ending in enumerate(endings) for order in orders if order <= len(ending)
        ]
        rows = [row for _, row in pairs]
        self.learn([context for context, _ in pairs], ids[rows], probabilities[rows])

    def _learn(self, contexts: Sequence[Context], ids: np.ndarray, probabilities: np.ndarray) -> None:
        with self.lock:
            slots = [self._slot(context) for context in contexts]
            # A context that occurs several times takes its distributions one after the other.
            rounds: list[list[int]] = []
            met: dict[int, int] = {}
            for row, slot in enumerate(slots):
                turn = met[slot] = met.get(slot, -1) + 1
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append(row)
            for rows in rounds:
                self._average(np.array([slots[row] for row in rows]), ids[rows], probabilities[rows])

    def _slot(self, context: Context) -> int:
        slot = self._slots.get(context)
        if slot is not None:
            self._slots.move_to_end(context)
            return slot
        if len(self._slots) >= self.contexts:
            _, slot = self._slots.popitem(last=False)
            self._ids[slot], self._weights[slot], self._counts[slot] = -1, 0.0, 0
        else:
            slot = len(self._slots)
            if slot == len(self._counts):
                self._ids = np.concatenate((self._ids, np.full_like(self._ids, -1)))
                self._weights = np.concatenate((self._weights, np.zeros_like(self._weights)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._slots[context] = slot
        return slot

    def _average(self, slots: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> None:
        old, count = self._ids[slots], self._counts[slots, None]
        share = (1.0 / (count + 1)).astype(np.float32)
        same = (old[:, :, None] == ids[:, None, :]) & (ids[:, None, :] >= 0)
        kept = self._weights[slots] * (1 - share) + (same * probabilities[:, None, :]).sum(axis=2) * share
        fresh = np.where(same.any(axis=1) | (ids < 0), 0.0, probabilities * share)
        every = np.concatenate((old, ids), axis=1)
        weights = np.concatenate((kept, fresh), axis=1)
        best = np.argsort(-weights, axis=1, kind="stable")[:, : self.width]
        weights = np.take_along_axis(weights, best, axis=1)
        self._ids[slots] = np.where(weights > 0, np.take_along_axis(every, best, axis=1), -1)
        self._weights[slots] = weights
        self._counts[slots] = count[:, 0] + 1


def _first(get: Callable[[Context], int | None], context: Context, orders: Sequence[int]) -> int:
    for order in orders:
        if order <= len(context) and (slot := get(context[-order:])) is not None:
            return slot
    return -1
