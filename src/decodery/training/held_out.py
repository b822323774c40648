"""Figures of data that chose nothing, with intervals and what stands beside them: what kinds of training print."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from .loop import rounded

Item = TypeVar("Item")

_DRAWS = 1000
"""How often items are drawn for an interval."""
CONTROL = "shuffled labels"
"""What the same training on labels that say nothing is called in a report."""
FALLING = (
    "loss",
    "error",
    "bits per token",
    "cross_entropy",
    "unexplained variance",
    "more than without",
    "divergence",
    "passes",
)
"""Figures that are better where they are less."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % points of Student's distribution by degrees of freedom, from 1."""
_FEW = 6
"""With fewer items a difference of one sign in all of them has a two-sided p above 0.05."""


def bootstrap(values: Sequence[float], weights: Sequence[float] | None = None, *, seed: int = 0) -> list[float]:
    """The 95 % interval of a weighted mean, by drawing its items with replacement.

    Args:
        values: Of the items.
        weights: What each counts, all the same by default.
        seed: Of the draws.
    """
    each, counts = np.asarray(values, dtype=float), np.asarray(weights or [1.0] * len(values), dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(each), (_DRAWS, len(each)))
    means = (each * counts)[drawn].sum(axis=1) / counts[drawn].sum(axis=1).clip(min=1e-12)
    return [round(float(edge), 4) for edge in np.percentile(means, (2.5, 97.5))]


def paired(
    differences: Sequence[float], weights: Sequence[float] | None = None, units: int | None = None
) -> list[float]:
    """The 95 % interval of a weighted mean of differences, by Student's distribution: also of few items.

    Args:
        differences: Of the same item, at least two.
        weights: What each counts, all the same by default.
        units: How many items the degrees of freedom are of, all by default.
    """
    each, counts = np.asarray(differences, dtype=float), np.asarray(weights or [1.0] * len(differences), dtype=float)
    mean, size = float((each * counts).sum() / counts.sum()), len(each)
    error = float((((each - mean) * counts) ** 2).sum() * size / (size - 1)) ** 0.5 / float(counts.sum())
    free = (units or size) - 1
    # With more degrees of freedom, the first terms of the expansion around the normal distribution.
    wide = _STUDENT[free - 1] if free <= len(_STUDENT) else 1.96 + 2.372 / free + 2.823 / free**2
    return [round(mean - wide * error, 4), round(mean + wide * error, 4)]


class Measured(dict[str, Any]):
    """Figures of items that chose nothing, with what one of them is for each prompt, or other group.

    Attributes:
        name: The figure.
        each: What it is, by group.
        weights: What each group counts, all the same by default.
        units: How many groups there are; of a figure that compares two kinds, groups of the rarer one.
        groups: Which they are, where that may differ.
    """

    def __init__(
        self,
        figures: Mapping[str, Any],
        name: str,
        each: Sequence[float],
        weights: Sequence[float] | None = None,
        units: int | None = None,
        groups: Sequence[Hashable] = (),
    ) -> None:
        super().__init__(figures)
        self.groups = list(groups)
        self.name, self.each, self.weights = name, each, [1.0] * len(each) if weights is None else weights
        self.units = sum(each > 0 for each in self.weights) if units is None else units

    def gain(self, over: Mapping[str, Any] | None) -> dict[str, Any]:
        """By how much the figure is better than another one of the same items, with the paired 95 % interval.

        Args:
            over: What it is compared with.

        Returns:
            "gain" and "interval of gain". Nothing where the other is not of these items, or where fewer than two count.
        """
        if not isinstance(over, Measured) or (over.name, over.groups) != (self.name, self.groups):
            return {}
        if (units := min(self.units, over.units)) < 2:
            return {}
        sign = -1.0 if self.name in FALLING else 1.0
        differences = [sign * (own - other) for own, other in zip(self.each, over.each, strict=True)]
        mean = float(np.average(differences, weights=self.weights))
        return {"gain": mean, "interval of gain": paired(differences, self.weights, units)}


def compared(
    after: Mapping[str, Any],
    baselines: Mapping[str, Mapping[str, Any] | None],
    control: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Figures, and beside each of what they are compared with `Measured.gain` over it.

    Args:
        after: Of what was trained.
        baselines: The same of what it is compared with, by name; None for what could not be measured.
        control: The same of what was trained on shuffled labels.

    Returns:
        The figures, as "gain" a sentence of all gains, the "baselines" and the control.
    """
    others = {**baselines, CONTROL: control}
    gains = {name: after.gain(each) if isinstance(after, Measured) else {} for name, each in others.items()}
    beside = {name: None if each is None else rounded({**each, **gains[name]}) for name, each in others.items()}
    shuffled = {} if control is None else {CONTROL: beside[CONTROL]}
    known = {name: each["interval of gain"] for name, each in gains.items() if each}
    said = {"gain": _said(known, after.units)} if known and isinstance(after, Measured) else {}
    return {**rounded(after), **said, "baselines": {name: beside[name] for name in baselines}, **shuffled}


def hold_out(groups: Sequence[Hashable], every: int) -> tuple[list[int], list[int]]:
    """Numbers of items to learn from, and of held-out items, of one group in `every`.

    The groups are of all sizes but the largest. Of fewer groups two are held out, where that leaves as many.
    Neighbours are of different groups, so that `HeldOut` does not choose by the groups that it tests; held-out items
    without a neighbour of another group are left out.

    Args:
        groups: Of each item.
        every: How many groups one is held out of.
    """
    numbers: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        numbers.setdefault(group, []).append(number)
    whole = sorted(numbers.values(), key=len)
    every = min(every, max(2, len(whole) // 2))
    # The last of `every` is never held out: the largest of all would leave little to learn from.
    held = [whole[first + turn % (every - 1)] for turn, first in enumerate(range(0, len(whole) - every + 1, every))]
    out = {number for each in held for number in each}
    even, odd = _halves(held)
    turns = [*chain(*zip(even, odd, strict=False)), *even[len(odd) :][: 1 if odd else None]]
    return [number for number in range(len(groups)) if number not in out], turns


def _halves(groups: Iterable[list[int]]) -> tuple[list[int], list[int]]:
    """The items of whole groups in two halves of about the same size, the larger one first."""
    sides: tuple[list[int], list[int]] = [], []
    for each in sorted(groups, key=len, reverse=True):
        min(sides, key=len).extend(each)
    even, odd = sorted(sides, key=len, reverse=True)
    return even, odd


@dataclass(frozen=True)
class HeldOut(Generic[Item]):
    """What nothing is learned from: one half chooses the best step, the other half chooses nothing.

    Attributes:
        choosing: The items by which the best step is chosen.
        tested: The others; the same where there is one item alone.
        groups: Of the tested items the prompts, or what else they have in common; none where each stands for itself.
        common: What that is, in the plural.
    """

    choosing: list[Item]
    tested: list[Item]
    groups: Sequence[Hashable] = ()
    common: str = "prompts"

    @classmethod
    def of(cls, items: Sequence[Item], groups: Sequence[Hashable] = (), common: str = "prompts") -> HeldOut[Item]:
        """Every other item for each half, and no group in both.

        Args:
            items: In the order of `hold_out`, of which some may have been left out.
            groups: Of all of them.
            common: What groups are, in the plural.
        """
        chosen, tested = list(range(0, len(items), 2)), list(range(1, len(items), 2))
        if set(groups[::2]) & set(groups[1::2]):
            # Items that were left out since have shifted the turns of the others.
            whole: dict[Hashable, list[int]] = {}
            for number, group in enumerate(groups):
                whole.setdefault(group, []).append(number)
            chosen, tested = _halves(whole.values())
        choosing = [items[number] for number in chosen]
        known = [groups[number] for number in tested or chosen] if groups else ()
        return cls(choosing, [items[number] for number in tested] or choosing, known, common)

    def report(
        self,
        after: Mapping[str, Any],
        baselines: Mapping[str, Mapping[str, Any]],
        unit: str = "texts",
        control: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What a kind prints: what it was tested on, and `compared`.

        Args:
            after: What `measured` said of what was trained.
            baselines: The same of what it is compared with, by name.
            unit: What an item is, in the plural.
            control: The same of what was trained on shuffled labels.
        """
        return {"tested on": self.said(unit), **compared(after, baselines, control)}

    def said(self, unit: str = "texts") -> str:
        """What was tested on, for a report.

        Args:
            unit: What an item is, in the plural.
        """
        items, groups, alone = len(self.tested), len(set(self.groups)), self.tested is self.choosing
        said = f"{items} {unit}{f' of {groups} {self.common}' if 0 < groups < items else ''}"
        return f"{said} that {'also chose the best step' if alone else 'chose nothing'}"

    def measured(
        self,
        figures: Callable[[list[Item]], Mapping[str, float]],
        name: str,
        weight: Callable[[Item], float] = lambda item: 1.0,
    ) -> Measured:
        """Figures of the items that chose nothing, and a 95 % interval over their groups under "interval of".

        Args:
            figures: Of items.
            name: The figure that has an interval; None is that of one group alone.
            weight: What an item counts in the figure.
        """
        whole, parts = figures(self.tested), dict[Hashable, list[Item]]()
        for group, item in zip(self.groups or range(len(self.tested)), self.tested, strict=True):
            parts.setdefault(group, []).append(item)
        weights = [sum(map(weight, part)) for part in parts.values()]
        each = [figures(part)[name] for part in parts.values()] if len(parts) > 1 else [whole[name]]
        edges = bootstrap(each, weights) if len(parts) > 1 else None
        return Measured({**whole, f"interval of {name}": edges}, name, each, weights)


def _said(gains: Mapping[str, Sequence[float]], units: int) -> str:
    """A sentence of what is better, and than what.

    Args:
        gains: Intervals, by what they are a gain over.
        units: How many groups of items they are of.
    """
    if units < _FEW:
        return f"fewer than {_FEW} items or prompts, or of the rarer kind, were tested: too few to say what is better"
    kinds: dict[str, list[str]] = {}
    for name, (low, high) in gains.items():
        how = "better than" if low > 0 else "worse than" if high < 0 else "not shown to be better than"
        kinds.setdefault(how, []).append(name)
    return "; ".join(f"{how} {', '.join(names)}" for how, names in kinds.items())
