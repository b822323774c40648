"""Log-linear laws of drafts: what ten times the training, the size or the batch buys, and how sure that is.

Scaling Laws for Speculative Decoding (2025) finds that accepted lengths grow with the logarithm of training tokens and
of capacity, and speed with that of the batch. Its constants are other models' own: these are fitted to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError

LEVEL = 0.95
_WIDTH, _HEIGHT, _EDGE = 640, 360, 56


@dataclass(frozen=True)
class Law:
    """value = intercept + slope * ln(amount), by least squares. r2: the share of the spread that it tells.

    slope_interval: of the slope at `LEVEL`, where errors are normal and alike. amounts, values: what it was fitted to.
    """

    intercept: float
    slope: float
    r2: float
    slope_interval: tuple[float, float]
    amounts: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def fit(cls, amounts: Sequence[float], values: Sequence[float]) -> Law:
        """Raises SettingsError for fewer than three measurements, or amounts that are alike or not above 0."""
        n = len(amounts)
        if n < 3 or len(set(amounts)) < 2 or min(amounts) <= 0:
            raise SettingsError("a law needs three measurements at least, at amounts above 0 that are not all the same")
        x, y = np.log(np.asarray(amounts, dtype=float)), np.asarray(values, dtype=float)
        centred = x - x.mean()
        slope = float(centred @ y / (centred @ centred))
        intercept = float(y.mean() - slope * x.mean())
        spread = float(((y - y.mean()) ** 2).sum())
        left = float(((y - intercept - slope * x) ** 2).sum())
        reach = students_t(n - 2) * math.sqrt(left / (n - 2) / float(centred @ centred))
        r2 = 1.0 - left / spread if spread else 1.0
        return cls(intercept, slope, r2, (slope - reach, slope + reach), tuple(amounts), tuple(values))

    def at(self, amount: float) -> tuple[float, float, float]:
        """What is to be expected of one more measurement there, and the interval it should lie in at `LEVEL`."""
        x, n = np.log(np.asarray(self.amounts)), len(self.amounts)
        centred = x - x.mean()
        left = float(((np.asarray(self.values) - self.intercept - self.slope * x) ** 2).sum())
        away = (math.log(amount) - float(x.mean())) ** 2 / float(centred @ centred)
        reach = students_t(n - 2) * math.sqrt(left / (n - 2) * (1.0 + 1.0 / n + away))
        expected = self.intercept + self.slope * math.log(amount)
        return expected, expected - reach, expected + reach


@dataclass(frozen=True)
class Plane:
    """value = intercept + sum of slopes[k] * ln(amount k), by least squares: what two amounts bring side by side.

    slope_intervals: of each slope at `LEVEL`. amounts: [n][k]; values: [n]; what it was fitted to.
    """

    intercept: float
    slopes: tuple[float, ...]
    slope_intervals: tuple[tuple[float, float], ...]
    r2: float
    amounts: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    @classmethod
    def fit(cls, amounts: Sequence[Sequence[float]], values: Sequence[float]) -> Plane:
        """Raises SettingsError where measurements are too few, or do not tell the amounts' shares apart."""
        rows, y = _rows(amounts), np.asarray(values, dtype=float)
        n, terms = rows.shape
        if n <= terms or np.linalg.matrix_rank(rows) < terms:
            raise SettingsError(
                f"a law of {terms - 1} amounts needs {terms + 1} measurements at least, in which they do not always "
                "change together"
            )
        found, reach = np.linalg.lstsq(rows, y, rcond=None)[0], students_t(n - terms)
        left = float(((y - rows @ found) ** 2).sum())
        spread = float(((y - y.mean()) ** 2).sum())
        widths = reach * np.sqrt(left / (n - terms) * np.diag(np.linalg.inv(rows.T @ rows)))
        intervals = tuple((float(a - b), float(a + b)) for a, b in zip(found[1:], widths[1:], strict=True))
        slopes = tuple(float(each) for each in found[1:])
        kept = tuple(tuple(float(one) for one in each) for each in amounts)
        r2 = 1.0 - left / spread if spread else 1.0
        return cls(float(found[0]), slopes, intervals, r2, kept, tuple(float(each) for each in values))

    def at(self, amounts: Sequence[float]) -> tuple[float, float, float]:
        """What is to be expected of one more measurement there, and the interval it should lie in at `LEVEL`."""
        rows, row = _rows(self.amounts), _rows([amounts])[0]
        n, terms = rows.shape
        found = np.array([self.intercept, *self.slopes])
        left = float(((np.asarray(self.values) - rows @ found) ** 2).sum())
        away = float(row @ np.linalg.inv(rows.T @ rows) @ row)
        reach = students_t(n - terms) * math.sqrt(left / (n - terms) * (1.0 + away))
        expected = float(row @ found)
        return expected, expected - reach, expected + reach


def _rows(amounts: Sequence[Sequence[float]]) -> np.ndarray:
    x = np.asarray(amounts, dtype=float)
    if x.min() <= 0:
        raise SettingsError("a law needs amounts above 0")
    return np.concatenate((np.ones((len(x), 1)), np.log(x)), axis=1)


@lru_cache
def students_t(freedom: int) -> float:
    """The number that Student's t with so many degrees of freedom is within, up to its sign, with chance `LEVEL`."""
    # With t = sqrt(freedom) tan(angle) the density is a power of the cosine.
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return math.sqrt(freedom) * math.tan(float(np.interp(LEVEL, below / below[-1], angles)))


def report(amounts: Sequence[float], values: Sequence[float], factor: float = 2.0) -> dict[str, object]:
    """The law of some measurements as plain data, and what it says of `factor` times the largest amount.

    held_out: what the law of all others says of the largest amount, where there are enough of them, and what it is.
    """
    order = np.argsort(amounts)
    x, y = [float(amounts[i]) for i in order], [float(values[i]) for i in order]
    law = Law.fit(x, y)
    found: dict[str, object] = {
        "intercept": law.intercept,
        "slope": law.slope,
        "slope_interval": law.slope_interval,
        "r2": law.r2,
        "amounts": x,
        "values": y,
        "next": {"amount": factor * x[-1], **_interval(law, factor * x[-1])},
    }
    if len(x) > 3 and len(set(x[:-1])) > 1:
        found["held_out"] = {"amount": x[-1], "measured": y[-1], **_interval(Law.fit(x[:-1], y[:-1]), x[-1])}
    return found


def joint_report(amounts: Sequence[Sequence[float]], values: Sequence[float], factor: float = 2.0) -> dict[str, object]:
    """The law of measurements of several amounts each, and what `factor` times each of the largest alone would give.

    predicted: of every measurement that the others are enough for, what the law of all others says of it.
    """
    law, largest = Plane.fit(amounts, values), np.max(np.asarray(amounts, dtype=float), axis=0)
    most = np.where(np.eye(len(largest), dtype=bool), factor * largest, largest)
    foretold = []
    for number, (each, value) in enumerate(zip(amounts, values, strict=True)):
        others = [other for other in range(len(values)) if other != number]
        try:
            without = Plane.fit([amounts[other] for other in others], [values[other] for other in others])
        except SettingsError:
            continue
        foretold.append({"amounts": list(each), "measured": value, **_interval(without, each)})
    return {
        "intercept": law.intercept,
        "slopes": law.slopes,
        "slope_intervals": law.slope_intervals,
        "r2": law.r2,
        "amounts": [list(each) for each in law.amounts],
        "values": list(law.values),
        "next": [{"amounts": each.tolist(), **_interval(law, each.tolist())} for each in most],
        "foretold": foretold,
    }


def _interval(law: Law | Plane, amount: Any) -> dict[str, float]:
    expected, low, high = law.at(amount)
    return {"expected": expected, "low": low, "high": high}


def plot_foretold(foretold: Sequence[Mapping[str, Any]], unit: str) -> str:
    """What the law of all others says of each measurement against what was measured, as SVG; see `joint_report`."""
    bounds = [each[name] for each in foretold for name in ("low", "high", "measured")]
    bottom, top = min(bounds), max(bounds)
    room = (top - bottom) or 1.0

    def across(value: float) -> float:
        return _EDGE + (value - bottom) / room * (_WIDTH - 2 * _EDGE)

    def up(value: float) -> float:
        return _HEIGHT - _EDGE - (value - bottom) / room * (_HEIGHT - 2 * _EDGE)

    marks = []
    for each in foretold:
        x = across(each["measured"])
        marks += [
            f'<path d="M{x:.1f} {up(each["low"]):.1f}V{up(each["high"]):.1f}" stroke="#4878a8" stroke-opacity="0.5"/>',
            f'<circle cx="{x:.1f}" cy="{up(each["expected"]):.1f}" r="4" fill="#222"/>',
        ]
    ends = f"M{across(bottom):.1f} {up(bottom):.1f}L{across(top):.1f} {up(top):.1f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
            f'<path d="{ends}" stroke="#4878a8" stroke-width="2" fill="none"/>',
            *marks,
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 16}" text-anchor="middle" font-size="13">{unit}, measured, '
            f"{bottom:.3g} to {top:.3g}</text>",
            f'<text x="{_EDGE}" y="24" font-size="13">predicted from all others; lines: {LEVEL:.0%}</text>',
            "</svg>",
        ]
    )


def plot(law: Law, label: str, unit: str, factor: float = 2.0) -> str:
    """Measurements, the law and its interval as SVG, up to `factor` times the largest amount.

    label: what the amounts are; unit: what the values are.
    """
    end = factor * max(law.amounts)
    x = np.exp(np.linspace(math.log(min(law.amounts)), math.log(end), 60))
    expected, low, high = (np.array(each) for each in zip(*(law.at(each) for each in x), strict=True))
    bottom, top = float(min(low.min(), min(law.values))), float(max(high.max(), max(law.values)))
    room = (top - bottom) or 1.0

    def place(amount: float, value: float) -> str:
        across = (math.log(amount) - math.log(x[0])) / (math.log(end) - math.log(x[0]))
        up = (value - bottom) / room
        return f"{_EDGE + across * (_WIDTH - 2 * _EDGE):.1f},{_HEIGHT - _EDGE - up * (_HEIGHT - 2 * _EDGE):.1f}"

    def line(values: np.ndarray) -> str:
        return " ".join(place(each, value) for each, value in zip(x, values, strict=True))

    band = line(high) + " " + " ".join(reversed(line(low).split()))
    dots = (place(each, value).split(",") for each, value in zip(law.amounts, law.values, strict=True))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
            f'<polygon points="{band}" fill="#4878a8" fill-opacity="0.15"/>',
            f'<polyline points="{line(expected)}" fill="none" stroke="#4878a8" stroke-width="2"/>',
            *(f'<circle cx="{across}" cy="{up}" r="4" fill="#222"/>' for across, up in dots),
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 16}" text-anchor="middle" font-size="13">{label}, '
            f"{x[0]:.3g} to {end:.3g} (logarithmic)</text>",
            f'<text x="{_EDGE}" y="24" font-size="13">{unit}, {bottom:.3g} to {top:.3g}; shaded: {LEVEL:.0%}</text>',
            "</svg>",
        ]
    )
