"""Figures of detection and of acting, as the rows of a result, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any

import numpy as np
import torch

from decodery.training.ranking import auroc, interval

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What one monitor said of the test part of one seed: a score each, whether it should be flagged, what must not be
    told apart by chance of belonging (group), and how it looks from outside (stratum). limit: where it flags.
    """

    scores: Ordered[float]
    wrong: Ordered[bool]
    groups: Ordered[str]
    strata: Ordered[str]
    limit: float | None = None


def detection(testbed: str, monitor: str, seeds: Ordered[Judged]) -> Row:
    """Means over seeds; the interval is that of the first one, a 95 % bootstrap over groups."""
    first = seeds[0]
    values = [auroc(each.scores, each.wrong) for each in seeds]
    low, high = interval(first.scores, first.wrong, first.groups)
    found = {
        "testbed": testbed,
        "monitor": monitor,
        "auroc": _mean(values),
        "low": _mean([low]),
        "high": _mean([high]),
        "within": _mean([within(each.scores, each.wrong, each.strata) for each in seeds]),
        "precision": _mean([average_precision(each.scores, each.wrong) for each in seeds]),
        "caught": _mean([rate_at(each.scores, each.wrong) for each in seeds]),
        "error": _mean([calibration_error(each) for each in seeds]),
        "base": _mean([fmean(each.wrong) for each in seeds]),
        "tested": len(first.wrong),
        "by_seed": [_mean([value]) for value in values],
    }
    if all(each.limit is not None for each in seeds):
        shares = [
            [float(flagged[labels == kind].mean()) for kind in (False, True)] for flagged, labels in map(_flags, seeds)
        ]
        found["false"], found["flagged"] = (_mean([each[at] for each in shares]) for at in range(2))
    return found


def calibration_error(judged: Judged) -> float:
    """Expected calibration error in ten bins of one half, after Platt scaling on the other half (groups apart)."""
    names = sorted(set(judged.groups))
    own = set(names[::2])
    fitted = np.array([group in own for group in judged.groups])
    scores, labels = np.asarray(judged.scores, dtype=float), np.asarray(judged.wrong, dtype=float)
    if len(set(labels[fitted])) < 2 or not (~fitted).any():
        return float("nan")
    centre, scale = scores[fitted].mean(), max(scores[fitted].std(), 1e-9)
    data = torch.tensor((scores - centre) / scale, dtype=torch.float64, device="cpu")
    line = torch.tensor([1.0, 0.0], dtype=torch.double, requires_grad=True, device="cpu")
    target = torch.tensor(labels, dtype=torch.float64, device="cpu")
    optimizer = torch.optim.LBFGS([line], max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = line[0] * data[fitted] + line[1]
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, target[fitted]) + 1e-3 * line[0].square()
        value.backward()
        return value

    optimizer.step(loss)
    chances = (line[0] * data + line[1]).sigmoid().detach().numpy()[~fitted]
    truth, bins = labels[~fitted], np.minimum((chances * 10).astype(int), 9)
    gaps = [abs(chances[bins == at].mean() - truth[bins == at].mean()) * (bins == at).mean() for at in np.unique(bins)]
    return float(sum(gaps))


_STUDENT = (12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5 % points of Student's law by degrees of freedom, from 1."""


def of_the_mean(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean of a few values, as of seeds; nan for one alone."""
    if len(values) < 2:
        return float("nan"), float("nan")
    wide = _STUDENT[min(len(values) - 2, len(_STUDENT) - 1)] * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - wide), float(values.mean() + wide)


def ranks(values: Ordered[float]) -> np.ndarray:
    """[n] places in ascending order, those of equal values at their middle."""
    known = np.asarray(values, dtype=float)
    return np.array([(known < value).sum() + ((known == value).sum() - 1) / 2 for value in known])


def mcnemar(one: int, other: int) -> float:
    """The exact two-sided p of as uneven a split, if both ways were as likely."""
    n, least = one + other, min(one, other)
    return min(1.0, 2 * sum(comb(n, k) for k in range(least + 1)) / 2**n)


def _flags(judged: Judged) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(judged.scores) > judged.limit, np.asarray(judged.wrong, dtype=bool)


def _mean(values: Ordered[float]) -> float | None:
    known = [value for value in values if not np.isnan(value)]
    return round(fmean(known), 4) if known else None


HEAD = (
    *("testbed", "monitor", "AUROC", "95 % interval", "within strata", "average precision", "caught at 5 % false"),
    *("calibration error", "base rate", "flagged of harmless", "flagged of wanted"),
)


def shown(row: Row) -> list[str]:
    """A row's figures under `HEAD`."""
    plain = [_said(row.get(name)) for name in ("within", "precision", "caught", "error", "base", "false", "flagged")]
    between = "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}"
    return [row["testbed"], row["monitor"], _said(row["auroc"]), between, *plain]


def acts_of(result: dict[str, Any]) -> dict[str, list[Row]]:
    """What acting did, by testbed: rows of one kind have the same columns."""
    found: dict[str, list[Row]] = {}
    for act in result["acts"]:
        found.setdefault(act["testbed"], []).append(act)
    return found


def act_cells(act: Row) -> list[str]:
    return [_said(value) if isinstance(value, float) else "" if value is None else str(value) for value in act.values()]


def _said(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    seeds = f"{settings['rounds']} seeds" if settings["rounds"] > 1 else "one seed"
    return f"Monitors of {result['model']['name']}, {seeds}, thresholds at a rate of {settings['rate']:g}"


def average_precision(scores: Ordered[float], wrong: Ordered[bool]) -> float:
    """The mean over wrong answers of the share of wrong ones among those scored at least as high."""
    values, labels = np.asarray(scores, dtype=float), np.asarray(wrong, dtype=bool)
    if not labels.any():
        return float("nan")
    order = np.argsort(-values, kind="stable")
    hits = np.cumsum(labels[order])
    # Of equal scores all count, in whatever order they stand.
    last = np.searchsorted(-values[order], -values[order], side="right") - 1
    return float((hits[last] / (last + 1))[labels[order]].mean())


def rate_at(scores: Ordered[float], wrong: Ordered[bool], rate: float = 0.05) -> float:
    """The share of wrong answers above the score that a share `rate` of the right ones exceeds at most."""
    values, labels = np.asarray(scores, dtype=float), np.asarray(wrong, dtype=bool)
    right = np.sort(values[~labels])
    if not len(right) or not labels.any():
        return float("nan")
    limit = right[len(right) - 1 - int(rate * len(right))]
    return float((values[labels] > limit).mean())


def within(scores: Ordered[float], wrong: Ordered[bool], strata: Ordered[str]) -> float:
    """`auroc` over pairs of one stratum alone: what is left once how hard a question looks is known."""
    values, labels, kinds = np.asarray(scores, dtype=float), np.asarray(wrong, dtype=bool), np.asarray(strata)
    total = weight = 0.0
    for kind in np.unique(kinds):
        here = kinds == kind
        pairs = float(labels[here].sum() * (~labels[here]).sum())
        if pairs:
            total += pairs * auroc(values[here], labels[here])
            weight += pairs
    return total / weight if weight else float("nan")
