"""The most likely successors of every token, as the model last ranked them."""

from __future__ import annotations

import numpy as np

from decodery.core.topk import topk
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Guarded


class Adjacency(Guarded):
    """One row of successors per token, best first; -1 where nothing is known yet.

    Memory: 4 * vocab * width bytes, whatever happens.

    Args:
        matrix: [vocab, width] int32.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        self.matrix = np.full((vocab_size, min(width, vocab_size)), -1, dtype=np.int32)
        super().__init__()

    @property
    def width(self) -> int:
        return self.matrix.shape[1]

    def successors(self, tokens: np.ndarray) -> np.ndarray:
        """[n, width] int32 of `tokens` [n]."""
        with self.lock:
            return self.matrix[tokens]

    def row(self, token: int) -> list[int]:
        """The successors of one token, best first, -1 where unknown."""
        row: list[int] = self.matrix[token].tolist()
        return row

    def ranks(self, tokens: np.ndarray, following: np.ndarray) -> np.ndarray:
        """[m] int64: at which rank `following` stands after `tokens`, of the tokens that are known.

        `width` where it is not among the successors.
        """
        rows = self.successors(tokens)
        known = rows[:, 0] >= 0
        hit = rows[known] == following[known, None]
        return np.where(hit.any(axis=1), hit.argmax(axis=1), self.width)

    def learn(self, seen: VerificationFeedback) -> None:
        """Take over the successors the model ranked highest at every scored row, rejected ones too.

        Of several rows with one token the accepted one counts, else the deepest.
        """
        nodes = np.concatenate((np.arange(len(seen.tree)), [0], np.asarray(seen.path, dtype=np.int64)))
        tokens = seen.tree.tokens[nodes]
        unique, last = np.unique(tokens[::-1], return_index=True)
        winners = nodes[len(nodes) - 1 - last]
        ids, _ = topk(seen.logits, self.width)
        with self.lock:
            self.matrix[unique] = ids[winners]
