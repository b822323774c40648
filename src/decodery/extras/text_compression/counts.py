"""Logits as integer frequencies, by integer arithmetic alone: the same on every machine that has the same logits."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from decodery.core.errors import NumericalError, UnsupportedModel

TOTAL = 1 << 24
"""What all frequencies of a row add up to."""
_STEPS = 256
"""Steps of a nat that logits are rounded down to."""
_NATS = 24
"""Below the largest logit by more, a token has the least frequency."""
_UNIT = 1 << 32


@cache
def _weights() -> np.ndarray:
    """[n] int64: e^(-i / steps) as a multiple of 2^-32, the last one 0. Only integers are multiplied."""
    # e^(-1 / 256) to 128 binary digits, from its series; no machine's own exponential function is asked.
    one, term, ratio, k = 1 << 128, 1 << 128, 0, 0
    while term:
        ratio += term if k % 2 == 0 else -term
        k += 1
        term //= k * _STEPS
    found, value = [], one
    for _ in range(_NATS * _STEPS):
        found.append(value >> 128 - 32)
        value = value * ratio >> 128
    return np.array([*found, 0], dtype=np.int64)


def check_vocabulary(size: int) -> None:
    """Raise UnsupportedModel for more tokens than frequencies can tell apart well."""
    if 4 * size > TOTAL:
        raise UnsupportedModel(f"a vocabulary of {size} tokens is too large to compress with: use another model")


def frequencies(logits: torch.Tensor) -> np.ndarray:
    """[n, vocab] float32 logits -> [n, vocab] int64 frequencies >= 1; rows add up to `TOTAL`.

    Raises:
        NumericalError: For logits that are no distribution.
    """
    rows = logits.numpy()
    largest = rows.max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        raise NumericalError("the model's logits are not finite, and nothing can be coded with them")
    # A power of two times a difference is exact, and so is what is rounded down of it.
    below = np.minimum((largest - rows) * np.float32(_STEPS), np.float32(_NATS * _STEPS))
    weights = _weights()[below.astype(np.int32)]
    counts = 1 + weights * (TOTAL - rows.shape[1]) // weights.sum(axis=1, keepdims=True)
    counts[np.arange(len(rows)), rows.argmax(axis=1)] += TOTAL - counts.sum(axis=1)
    return counts
