"""What searches over samples would do on average, computed from one pool of samples and not by drawing again.

A pool is larger than the searches it is asked about; every subset of a size is taken to be as likely as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby
from math import comb

import numpy as np

from decodery.core.errors import SettingsError

from .answers import vote

_SUBSETS = 200


def pass_at(k: int, right: int, total: int) -> float:
    """The probability that one of k samples is right, by the unbiased estimator: `right` of `total` are."""
    _check(k, total)
    if not 0 <= right <= total:
        raise SettingsError(f"{right} of {total} samples cannot be right")
    return (comb(total, k) - comb(total - right, k)) / comb(total, k)


def best_of(n: int, scores: Sequence[float], right: Sequence[float]) -> float:
    """How right, on average, the best scored of n samples is.

    Of those with equal scores each is as likely the best.

    Args:
        scores: Of the pool, higher is better; with the lengths of texts, negative, this is first-finish.
        right: Of each sample, whether it is, or how much.
    """
    total = len(scores)
    _check(n, total)
    if len(right) != total or any(score != score for score in scores):
        raise SettingsError("every sample of a pool needs a score, which is a number, and whether it is right")
    subsets, found, below = comb(total, n), 0.0, 0
    for _, group in groupby(sorted(zip(scores, right, strict=True)), key=lambda sample: sample[0]):
        ties = [worth for _, worth in group]
        # The best of a subset has this score: all of it lies at or below, and not all of it below.
        chance = (comb(below + len(ties), n) - comb(below, n)) / subsets
        found += chance * sum(ties) / len(ties)
        below += len(ties)
    return found


def distinct_of(n: int, texts: Sequence[str]) -> float:
    """How many different texts there are, on average, among n of these: as often is a scorer asked."""
    total = len(texts)
    _check(n, total)
    return sum(1 - comb(total - texts.count(each), n) / comb(total, n) for each in set(texts))


def voted(
    n: int,
    answers: Sequence[str | None],
    right: Sequence[float],
    weights: Sequence[float] | None = None,
    *,
    subsets: int = _SUBSETS,
) -> float:
    """How right, on average over random subsets of n samples, the text is that a vote elects.

    The text is that of most weight among those with the elected answer, the first drawn among equals; without any
    answer the first of all. Subsets are in the order of the pool, all of them where there are no more than `subsets`.

    Args:
        answers: Of the pool, None where there is none.
        right, weights: Of each sample; weights are all 1 by default.
    """
    _check(n, len(answers))
    total, random, found = len(answers), np.random.default_rng(n), 0.0
    every = list(combinations(range(total), n)) if comb(total, n) <= subsets else None
    drawn = every or [np.sort(random.permutation(total)[:n]).tolist() for _ in range(subsets)]
    for chosen in drawn:
        weighed = None if weights is None else [weights[number] for number in chosen]
        groups = vote([answers[number] for number in chosen], weighed)
        best = 0
        if groups:
            best = max(groups[0].members, key=lambda member: 1.0 if weighed is None else weighed[member])
        found += right[chosen[best]]
    return found / len(drawn)


def _check(n: int, total: int) -> None:
    if not 1 <= n <= total:
        raise SettingsError(f"{n} of {total} samples cannot be drawn: give a pool that is as large")
