"""The smallest prefix of an order that holds a given share of the probability, without sorting a vocabulary."""

from __future__ import annotations

import numpy as np

_BINS = 64
_SORTED = 512
"""Up to this many entries a sort is cheaper than narrowing down."""


def smallest_prefix(keys: np.ndarray, weights: np.ndarray, share: float) -> tuple[float, int]:
    """Where the smallest prefix in ascending order of `keys` ends whose weights sum to at least `share`.

    Args:
        keys, weights: [m], at least one entry; all of it is the prefix if it does not hold the share.
        share: Of the sum of weights.

    Returns:
        The prefix's last key, and how many of the entries with this very key it needs.
    """
    before = 0.0
    while len(keys) > _SORTED and (low := float(keys.min())) < (high := float(keys.max())):
        # Equal keys share a bin and bins are in order: the border lies in the first bin that reaches the share.
        bins = ((keys - low) * ((_BINS - 1) / (high - low))).astype(np.intp)
        held = before + np.bincount(bins, weights=weights, minlength=_BINS).cumsum()
        border = min(int(held.searchsorted(share)), int(bins.max()))
        before = float(held[border - 1]) if border else before
        inside = bins == border
        keys, weights = keys[inside], weights[inside]
    order = keys.argsort(kind="stable")
    held = before + weights[order].cumsum(dtype=np.float64)
    last = min(int(held.searchsorted(share)), len(keys) - 1)
    ordered = keys[order]
    return ordered[last], last + 1 - int(ordered.searchsorted(ordered[last]))
