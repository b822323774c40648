"""What sequential Monte Carlo computes of the weights of its particles."""

from __future__ import annotations

import math

import numpy as np


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


def systematic(weights: np.ndarray, uniform: float) -> list[int]:
    """Indices [n]: number i comes floor or ceil of n times weights[i] often, on average exactly that.

    weights: [n], summing to 1. uniform: one number in (0, 1) that shifts n equal steps.
    """
    count = len(weights)
    edges = np.cumsum(weights)
    # The last step must meet a particle that lives, whatever the sum rounds to.
    edges[np.flatnonzero(weights)[-1] :] = np.inf
    return np.searchsorted(edges, (np.arange(count) + uniform) / count, side="right").tolist()
