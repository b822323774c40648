"""What sequential Monte Carlo computes of the weights of its particles."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from itertools import count as numbers_from

import numpy as np

from decodery.core.noise import RESAMPLE, draw


def log_mean(log_weights: np.ndarray) -> float:
    """Log of the mean of exp(log_weights), -inf where all are."""
    top = float(log_weights.max())
    return top + math.log(float(np.exp(log_weights - top).mean())) if top > -math.inf else -math.inf


def effective_size(log_weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2, between 1 and their number; 0 where all weights are 0."""
    top = log_weights.max()
    if top == -math.inf:
        return 0.0
    weights = np.exp(log_weights - top)
    return float(weights.sum() ** 2 / (weights**2).sum())


def normalised(log_weights: np.ndarray) -> np.ndarray:
    """exp(log_weights) over their sum; at least one of them must be more than -inf."""
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def systematic(weights: np.ndarray, uniform: float) -> list[int]:
    """Indices [n]: number i comes floor or ceil of n times weights[i] often, on average exactly that.

    Args:
        weights: [n], summing to 1.
        uniform: One number in (0, 1) that shifts n equal steps.
    """
    count = len(weights)
    return np.searchsorted(_edges(weights), (np.arange(count) + uniform) / count, side="right").tolist()


def multinomial(weights: np.ndarray, uniforms: Ordered[float]) -> list[int]:
    """Indices [m], each drawn by itself: number i with probability weights[i].

    Args:
        weights: [n], summing to 1.
        uniforms: [m] numbers in (0, 1).
    """
    return np.searchsorted(_edges(weights), uniforms, side="right").tolist()


def _edges(weights: np.ndarray) -> np.ndarray:
    """[n] where the share of each particle ends."""
    edges = np.cumsum(weights)
    # The last step must meet a particle that lives, whatever the sum rounds to.
    edges[np.flatnonzero(weights)[-1] :] = np.inf
    return edges


def uniforms(seed: int) -> Callable[[], float]:
    """One number in (0, 1) after another, for a population; the first is left to the draw of the answer."""
    numbers = numbers_from(1)
    return lambda: draw(seed, next(numbers), stream=RESAMPLE)
