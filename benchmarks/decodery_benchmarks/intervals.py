"""Bootstrap intervals, by scipy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

RESAMPLES = 10_000


def interval(
    *samples: np.ndarray,
    statistic: Callable[..., Any] = np.mean,
    vectorized: bool = True,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
    digits: int = 4,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic.

    Args:
        samples: What was measured; several samples are drawn in pairs.
        statistic: Of the samples, with a keyword `axis` where it is vectorized.
        vectorized: Whether the statistic takes many resamples at once.
        resamples: How many resamples are drawn.
        level: The share of them that the interval holds.
        seed: Decides the draws.
        digits: Decimals of the bounds.

    Returns:
        The lower and the upper bound; of a single observation both are the statistic's value.
    """
    if len(samples[0]) == 1:
        value = round(float(statistic(*samples)), digits)
        return value, value
    found = stats.bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        vectorized=vectorized,
        n_resamples=resamples,
        # In parts: all resamples of many items at once would take gigabytes.
        batch=1000,
        confidence_level=level,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    low, high = found.confidence_interval
    return round(float(low), digits), round(float(high), digits)
