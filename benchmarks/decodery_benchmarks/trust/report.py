"""What differs between two subjects: paired, with intervals, and said where it is more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import method_of, resolve

from ..intervals import interval
from .measures import Asked, Measure, Subject, agreement, measured

RESAMPLES = 2000
LEVEL = 0.95
LEAST = 0.02
"""A smaller difference is not called a change: two points of a share, .02 nats of a loss or of log-odds."""


@dataclass(frozen=True)
class Row:
    """One measure of both. low, high: the interval of the difference at 95 %, by bootstrap over the same items.

    changed: whether the interval leaves 0 out and the difference is more than `LEAST`. fixed: why the figure cannot
    differ, "" where it can: that it does not differ says nothing then.
    """

    name: str
    before: float
    after: float
    low: float
    high: float
    fixed: str = ""

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
    rows = []
    for name, old in before.items():
        new = after[name]
        if old.values.shape != new.values.shape:
            raise SettingsError(f"{name} was measured on other items: measure both on the same ones")
        if name == "choice":
            name, old, new = "flips of choices", *_flips(old, new)

        def delta(some: np.ndarray, old: Measure = old, new: Measure = new) -> float:
            return new.statistic(new.values[some]) - old.statistic(old.values[some])

        # Items are drawn by their places: a value may be a vector.
        low, high = interval(
            np.arange(len(old.values)),
            statistic=delta,
            vectorized=False,
            resamples=resamples,
            level=LEVEL,
            seed=seed,
            digits=12,
        )
        rows.append(Row(name, old.statistic(old.values), new.statistic(new.values), low, high))
    return rows


def report(original: Subject, other: Subject, asked: Asked, known: Mapping[str, Measure] | None = None) -> list[Row]:
    """`compared` of two subjects, and how far their models are apart. known: what is measured of the first."""
    apart = agreement(original.lm, other.lm, asked.texts)
    none = {name: Measure(np.zeros_like(each.values)) for name, each in apart.items()}
    before = measured(original, asked) if known is None else known
    after = measured(other, asked) | apart
    # A row of choices that flip has a name of its own, and is of logits as they are.
    return [
        replace(row, fixed=fixed(original, other, after.get(row.name, after["loss"])))
        for row in compared({**before, **none}, after)
    ]


def fixed(original: Subject, other: Subject, measure: Measure) -> str:
    """Why a measure of two subjects cannot differ, "" where it can.

    Args:
        original: one subject.
        other: the other one, which differs in its model, or in a drafter and a rule.
        measure: what was measured of both.

    Returns:
        A clause that says why: the measure reads logits of one and the same model, or its texts are decoded by a rule
        that leaves such texts as they are.
    """
    if other.lm.model is not original.lm.model:
        return ""
    if measure.of == "logits":
        return "read off the same model"
    rule = method_of(resolve("acceptance-rule", other.settings.get("acceptance_rule", "coupled")))
    if rule is None or not (rule.lossless or (measure.of == "greedy texts" and "greedy-identical" in rule.guarantee)):
        return ""
    return f"{rule.name} leaves {measure.of} as they are"


def _flips(old: Measure, new: Measure) -> tuple[Measure, Measure]:
    """Choices that are other ones than before, though as many may be right."""
    other = (old.values != new.values).astype(float)
    return Measure(np.zeros_like(other)), Measure(other)
