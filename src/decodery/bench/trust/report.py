"""What differs between two subjects: paired, with intervals, and said where it is more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...errors import SettingsError
from .measures import Asked, Measure, Subject, agreement, measured

RESAMPLES = 2000
LEVEL = 0.95
LEAST = 0.02
"""A smaller difference is not called a change: two points of a share, .02 nats of a loss or of log-odds."""


@dataclass(frozen=True)
class Row:
    """One measure of both. low, high: the interval of the difference at 95 %, by bootstrap over the same items.

    changed: whether the interval leaves 0 out and the difference is more than `LEAST`.
    """

    name: str
    before: float
    after: float
    low: float
    high: float

    @property
    def delta(self) -> float:
        return self.after - self.before

    @property
    def changed(self) -> bool:
        return not self.low <= 0.0 <= self.high and abs(self.delta) > LEAST


def compared(
    before: Mapping[str, Measure], after: Mapping[str, Measure], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Row]:
    """The measures that both have, items drawn again in pairs. Raises SettingsError where items are not the same."""
    random = np.random.default_rng(seed)
    rows = []
    for name, old in before.items():
        new = after[name]
        if old.values.shape != new.values.shape:
            raise SettingsError(f"{name} was measured on other items: measure both on the same ones")
        if name == "choice":
            name, old, new = "flips of choices", *_flips(old, new)
        drawn = random.integers(0, len(old.values), (resamples, len(old.values)))
        deltas = [new.statistic(new.values[some]) - old.statistic(old.values[some]) for some in drawn]
        edge = 100 * (1 - LEVEL) / 2
        low, high = np.percentile(deltas, (edge, 100 - edge))
        rows.append(Row(name, old.statistic(old.values), new.statistic(new.values), float(low), float(high)))
    return rows


def report(original: Subject, other: Subject, asked: Asked, known: Mapping[str, Measure] | None = None) -> list[Row]:
    """`compared` of two subjects, and how far their models are apart. known: what is measured of the first."""
    apart = agreement(original.lm, other.lm, asked.texts)
    none = {name: Measure(np.zeros_like(each.values)) for name, each in apart.items()}
    before = measured(original, asked) if known is None else known
    return compared({**before, **none}, measured(other, asked) | apart)


def _flips(old: Measure, new: Measure) -> tuple[Measure, Measure]:
    """Choices that are other ones than before, though as many may be right."""
    other = (old.values != new.values).astype(float)
    return Measure(np.zeros_like(other)), Measure(other)
