"""Figures of decoding, from how many tokens each pass emitted and how long it took.

The token that prefill gives counts neither as a token nor as a pass, for any method.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_Z = 1.96


def histogram(emitted: Iterable[int]) -> dict[int, int]:
    """How many passes emitted how many tokens, in ascending order of tokens."""
    return dict(sorted(Counter(emitted).items()))


def merge(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The histogram of all passes together."""
    total: Counter[int] = Counter()
    for one in histograms:
        total.update(one)
    return dict(sorted(total.items()))


def tokens_per_pass(passes: Mapping[int, int]) -> float:
    """Mean tokens a pass emits (micro: over pooled passes); 0 where there were none."""
    count = sum(passes.values())
    return sum(tokens * times for tokens, times in passes.items()) / count if count else 0.0


def macro(values: Sequence[float]) -> float:
    """Mean over requests of each one's own tokens per pass."""
    return sum(values) / len(values) if values else 0.0


def acceptance(passes: Mapping[int, int]) -> list[float]:
    """Conditional acceptance by depth: AR_i, i = 1 ..., of the passes that emitted at least i tokens, the share that
    emitted at least i + 1.

    Depths at which no pass ended count too, so that mean tokens per pass = 1 + sum over i of AR_1 * ... * AR_i.
    Ends at the last depth that was reached.
    """
    deepest = max(passes, default=0)
    at_least = [sum(times for tokens, times in passes.items() if tokens >= i) for i in range(1, deepest + 1)]
    return [after / before for before, after in pairwise(at_least)]


@dataclass(frozen=True)
class Timed:
    """One question's cost under one method. seconds_per_token: [rounds]; tokens: emitted per round, at least 1."""

    tokens: int
    seconds_per_token: tuple[float, ...]


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as plain decoding, with a 95 % interval."""

    value: float
    low: float
    high: float


def tokens_per_second(questions: Sequence[Timed]) -> float:
    """All tokens by all time, each question's time being its median over rounds; 0 where nothing was decoded."""
    seconds = sum(each.tokens * float(np.median(each.seconds_per_token)) for each in questions)
    return sum(each.tokens for each in questions) / seconds if seconds else 0.0


FEWEST = 5
"""Questions that an interval needs."""


def speed_up(plain: Sequence[Timed], method: Sequence[Timed], *, seed: int = 0, draws: int = 1000) -> SpeedUp | None:
    """Tokens per second of `method` by those of `plain`, question by question the same; None without questions.

    The interval is the bootstrap's 2.5th and 97.5th percentile: questions are drawn with replacement, and for every
    question drawn its rounds, the same ones for both methods, because they ran next to each other. Fewer than
    `FEWEST` questions say nothing about how others would fare, and the interval is the value alone.
    """
    if [len(each.seconds_per_token) for each in plain] != [len(each.seconds_per_token) for each in method]:
        raise ValueError("plain decoding and the method were not measured on the same questions and rounds")
    if not plain:
        return None
    value = tokens_per_second(method) / tokens_per_second(plain)
    if len(plain) < FEWEST:
        return SpeedUp(value, value, value)
    generator = np.random.default_rng(seed)
    chosen = generator.integers(len(plain), size=(draws, len(plain)))
    rounds = np.array([len(each.seconds_per_token) for each in plain])
    most = int(rounds.max())
    drawn = (generator.random((draws, len(plain), most)) * rounds[chosen][:, :, None]).astype(np.int64)
    ratios = _rate(method, rounds, chosen, drawn) / _rate(plain, rounds, chosen, drawn)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return SpeedUp(value, float(low), float(high))


def _rate(questions: Sequence[Timed], rounds: np.ndarray, chosen: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """[draws] tokens per second of the questions `chosen` [draws, n] in their rounds `drawn` [draws, n, most].

    rounds: [questions], how many each has; of `drawn` only the first so many count, the rest is padding.
    """
    most = drawn.shape[2]
    table = np.full((len(questions), most), np.nan)
    for row, count, each in zip(table, rounds, questions, strict=True):
        row[:count] = each.seconds_per_token
    count = rounds[chosen]
    costs = table[chosen[:, :, None], drawn]
    costs[np.arange(most) >= count[:, :, None]] = np.inf
    costs.sort(axis=2)
    lower, upper = ((count - 1) // 2)[:, :, None], (count // 2)[:, :, None]
    median = (np.take_along_axis(costs, lower, 2) + np.take_along_axis(costs, upper, 2))[:, :, 0] / 2
    tokens = np.array([each.tokens for each in questions])[chosen]
    return tokens.sum(axis=1) / (tokens * median).sum(axis=1)


def wilson(right: float, count: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share."""
    if not count:
        return 0.0, 1.0
    share, spread = right / count, _Z * _Z / count
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
