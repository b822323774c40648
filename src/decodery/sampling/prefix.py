"""The smallest prefix of an order with a given share of the probability, without sorting the vocabulary."""

from __future__ import annotations

import numpy as np

_BINS = 64
_SORTED = 512
"""Number of entries up to which a sort is faster than a search by bins."""


def smallest_prefix(keys: np.ndarray, weights: np.ndarray, share: float) -> tuple[float, int]:
    """Find the end of the smallest prefix in the order of `keys` whose weights sum to `share` or more.

    Args:
        keys: [m], at least one entry.
        weights: [m]; if all of them sum to less than `share`, the prefix is the whole array.
        share: Minimum sum of the weights.

    Returns:
        The last key of the prefix, and the number of entries with this key that belong to it.
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
