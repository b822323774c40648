"""What the writer and the reader of a coupled text both know of the message: a distribution for each of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from .mec import bottleneck, couple, entropy

_CERTAIN = 1e-9
"""Bits of uncertainty about a block that no further token is spent on."""

Pick = Callable[[np.ndarray, np.ndarray, int | None], int]
"""Of a group of tokens [n], their joint law [n, labels] with a block's label, and that block: the token's place in the
group. Without a block nothing is left to tell, and the joint law is the tokens' own [n, 1]."""


class Belief:
    """Posteriors over a message's blocks, all values equally likely at first.

    Deterministic, so both sides agree.

    Args:
        labels: [values] what of a value is told; itself unless the message is compressed once.
        open: Blocks not settled.
    """

    def __init__(self, count: int, bits: int, rate: float, compress: Literal["once", "step"], merge: bool) -> None:
        size = 1 << bits
        uniform = np.full(size, 1 / size)
        self.count, self.merge = count, merge
        self.limit = rate * bits if compress == "step" and rate < 1 else None
        self.labels = bottleneck(uniform, rate * bits) if compress == "once" else np.arange(size)
        prior = np.bincount(self.labels, weights=uniform)
        self.posteriors = [prior] * count
        self.bits_open = np.full(count, entropy(prior))
        self._sizes = np.bincount(self.labels)

    @property
    def open(self) -> int:
        return int((self.bits_open > _CERTAIN).sum())

    @property
    def settled(self) -> bool:
        return self.open == 0

    def follow(self, p: np.ndarray, pick: Pick) -> int:
        """Choose a token of distribution p [n] with `pick` and learn from it.

        Tokens that would tell the same one value of a block stay together and tell of a further block.

        Returns:
            Its index.
        """
        group = np.arange(len(p))
        while True:
            q = p[group] / p[group].sum()
            if self.settled:
                return int(group[pick(group, q[:, None], None)])
            block = int(self.bits_open.argmax())
            joint = self._joint(q, self.posteriors[block])
            at = pick(group, joint, block)
            row = joint[at]
            self._learn(block, row / row.sum())
            alike = np.array([at])
            if self.merge and np.count_nonzero(row) == 1:
                alike = np.flatnonzero((np.count_nonzero(joint, axis=1) == 1) & (joint[:, row.argmax()] > 0))
            group, chosen = group[alike], group[at]
            if len(group) == 1:
                return int(chosen)

    def guess(self) -> tuple[np.ndarray, float]:
        """The most likely value of every block, and the probability that all are right.

        Among equals the smallest value counts.
        """
        labels = [int(posterior.argmax()) for posterior in self.posteriors]
        values = np.array([int(np.flatnonzero(self.labels == label)[0]) for label in labels], dtype=np.int64)
        pairs = zip(self.posteriors, labels, strict=True)
        return values, float(np.prod([posterior[label] / self._sizes[label] for posterior, label in pairs]))

    def _joint(self, q: np.ndarray, posterior: np.ndarray) -> np.ndarray:
        """[tokens, labels] of low entropy; where a limit is set, of no more than that many bits about the block."""
        if self.limit is None:
            return couple(q, posterior)
        cells = bottleneck(posterior, self.limit)
        mass = np.bincount(cells, weights=posterior)
        told = couple(q, mass) / mass
        return told[:, cells] * posterior

    def _learn(self, block: int, posterior: np.ndarray) -> None:
        self.posteriors[block] = posterior
        self.bits_open[block] = entropy(posterior)


def split(message: bytes, bits: int) -> np.ndarray:
    """[8 * length / bits] int64: the message as numbers of `bits` bits, most significant first."""
    whole = np.unpackbits(np.frombuffer(message, dtype=np.uint8)).reshape(-1, bits).astype(np.int64)
    return whole @ (1 << np.arange(bits)[::-1])


def join(blocks: np.ndarray, bits: int) -> bytes:
    """The message that `split` took apart."""
    return np.packbits((blocks[:, None] >> np.arange(bits)[::-1]) & 1).tobytes()
