"""How well scores tell wrong answers from right ones, with intervals over groups, and how answers are split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from typing import Any, TypeVar

import numpy as np
import torch

from decodery.core.errors import SettingsError

from .held_out import Measured

Item = TypeVar("Item")
_WORDS = 4096
"""Of a bag, the most frequent ones: of long texts all would take gigabytes."""
PARTS = {"train": 0.5, "validation": 0.15, "calibration": 0.15, "test": 0.2}
"""Shares of the groups. The threshold is set on answers that nothing else was chosen by."""


def parts(groups: Ordered[str], seed: int = 0) -> np.ndarray:
    """[n] names of the part that each belongs to; all of one group belong to one part."""
    edges = np.cumsum(list(PARTS.values()))
    made = [hashlib.blake2b(f"{seed} {group}".encode(), digest_size=8).digest() for group in groups]
    places = np.array([int.from_bytes(each) / 2**64 for each in made])
    return np.array(list(PARTS))[np.minimum(np.searchsorted(edges, places, side="right"), len(edges) - 1)]


def part_of(items: Ordered[Item], group: Callable[[Item], str], seed: int, *names: str) -> list[Item]:
    """The items of some parts."""
    own = parts([group(each) for each in items], seed)
    return [each for each, part in zip(items, own, strict=True) if part in names]


def require_kinds(wrong: np.ndarray, part: np.ndarray) -> None:
    """Raise SettingsError if the train or validation part of answers has only one class."""
    for name in ("train", "validation"):
        if len(set(wrong[part == name].tolist())) < 2:
            raise SettingsError(
                f"the {name} part of {len(part)} answers has no two kinds to tell apart: give more questions, some "
                "of which the model can answer and some not"
            )


def auc(scores: Ordered[float] | np.ndarray, truth: Ordered[float] | np.ndarray, neither: float = 0.5) -> float:
    """The chance that something true scores above something false, ties half.

    Args:
        neither: What is given where all are of one kind.
    """
    values, place = np.unique(np.asarray(scores, dtype=float), return_inverse=True)
    share = np.asarray(truth, dtype=float)
    true, false = (np.bincount(place, each, len(values)) for each in (share, 1 - share))
    if not true.any() or not false.any():
        return neither
    return float((true * (np.cumsum(false) - false / 2)).sum() / (true.sum() * false.sum()))


def auroc(scores: Ordered[float] | np.ndarray, wrong: Ordered[bool] | np.ndarray) -> float:
    """The chance that a wrong answer scores above a right one, ties half; nan where there are not both."""
    return auc(scores, wrong, float("nan"))


def interval(
    scores: Ordered[float],
    wrong: Ordered[Any],
    groups: Ordered[str],
    statistic: Callable[[np.ndarray, np.ndarray], float] = auroc,
    *,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95 % bootstrap interval of `auroc`, whole groups drawn with replacement; nan without both kinds.

    Args:
        statistic: What the interval is of.
    """
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    rows = [np.flatnonzero(member == number) for number in range(len(names))]
    values, labels, random = np.asarray(scores, dtype=float), np.asarray(wrong), np.random.default_rng(seed)
    if len(set(labels.tolist())) < 2:
        return float("nan"), float("nan")
    found = []
    for _ in range(draws):
        taken = np.concatenate([rows[at] for at in random.integers(0, len(rows), len(rows))])
        found.append(statistic(values[taken], labels[taken]))
    low, high = np.nanpercentile(found, (2.5, 97.5))
    return float(low), float(high)


def turned(values: Ordered[float], known: Ordered[float], labels: Ordered[bool]) -> list[float]:
    """Values of a baseline, with the sign by which they rise with labels where these are known.

    Args:
        known: Such values of what was learned from.
        labels: Of these.
    """
    # nan where there is one kind alone.
    sign = -1 if auroc(known, labels) < 0.5 else 1
    return [sign * each for each in values]


def ranked(
    figures: Mapping[str, Any],
    name: str,
    scores: Ordered[float],
    wrong: Ordered[Any],
    groups: Ordered[str],
    statistic: Callable[[np.ndarray, np.ndarray], float] = auroc,
) -> Measured:
    """Figures with what each group counts in one of them, for `Measured.gain`: a jackknife over groups.

    Args:
        name: The figure, `statistic` of scores and what is known.
        wrong: Whether an item is what is looked for, or for other statistics a number.
    """
    values, labels = np.asarray(scores, dtype=float), np.asarray(wrong)
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    held = [len(set(member[labels == kind].tolist())) for kind in (False, True)] if labels.dtype == bool else []
    units = min([len(names), *held])
    if units < 2:
        return Measured(figures, name, (), units=units)
    without = np.array([statistic(values[member != at], labels[member != at]) for at in range(len(names))])
    each = statistic(values, labels) + (len(names) - 1) * (without.mean() - without)
    return Measured(figures, name, each.tolist(), units=units, groups=names.tolist())


def logistic(
    data: torch.Tensor, labels: torch.Tensor, ridge: float = 1e-3, *, constant: bool = False, **how: Any
) -> torch.Tensor:
    """Logistic regression with a small penalty.

    Args:
        data: [n, width] float64 rows; a column of ones is the caller's.
        labels: [n] from 0 to 1.
        constant: The last column is one of ones, whose weight has no penalty.
    """
    weight = torch.zeros(data.shape[1], dtype=torch.float64, requires_grad=True, device="cpu")
    optimizer = torch.optim.LBFGS([weight], **{"max_iter": 200, **how})

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        fit = torch.nn.functional.binary_cross_entropy_with_logits(data @ weight, labels)
        value = fit + ridge * (weight[:-1] if constant else weight).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach()


def _words(texts: Ordered[str]) -> list[set[str]]:
    """Of every text its words."""
    return [{word.strip(".,?!").lower() for word in text.split()} for text in texts]


def word_scores(train: Ordered[str], labels: Ordered[bool], test: Ordered[str]) -> list[float]:
    """What a bag of words says of texts: logistic regression on which of the usual words they hold."""
    if not test:
        return []
    known = [word for word, _ in Counter(word for words in _words(train) for word in sorted(words)).most_common(_WORDS)]

    def bags(texts: Ordered[str]) -> torch.Tensor:
        rows = [[1.0, *(float(word in each) for word in known)] for each in _words(texts)]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    weight = logistic(bags(train), torch.tensor([float(each) for each in labels], dtype=torch.float64, device="cpu"))
    return (bags(test) @ weight).tolist()
