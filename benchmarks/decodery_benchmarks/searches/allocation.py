"""From a benchmark of searches to a table for `compute-optimal`: which is best for prompts of which difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.search.allocation import Allocation
from decodery.search.pool import Sampled

from .figures import Outcomes, cells
from .rewards import reward as reward_of
from .settings import GREEDY, POOLED, SearchSettings

_POOLED = {
    "best-of-n": "best-of-n:scorer={scorer},n={n}",
    "weighted-vote": "weighted-vote:scorer={scorer},n={n},pattern={pattern}",
    "self-consistency": "self-consistency:n={n},pattern={pattern}",
    "first-finish": "first-finish:n={n},pattern={pattern}",
}
"""The searches that pooled methods are."""


@dataclass(frozen=True)
class Fold:
    """What is known of p prompts. strategies: searches as texts; right, tokens: [strategies, p] of each.

    plain: [p] mean tokens of a text. easy: [p] mean scores of `probes` texts; truly: [p] shares of right texts among
    all that were drawn. scorer: as a text. Tokens are with what the probes take, where a search draws anew.
    """

    scorer: str
    probes: int
    budgets: tuple[int, ...]
    strategies: tuple[str, ...]
    right: np.ndarray
    tokens: np.ndarray
    plain: np.ndarray
    easy: np.ndarray
    truly: np.ndarray

    @classmethod
    def of(cls, settings: SearchSettings, traces: Sequence[dict[str, Any]], reward: str, probes: int) -> Fold:
        """Raises SettingsError where the benchmark has no such reward, or nothing to choose among."""
        if reward not in settings.rewards:
            raise SettingsError(f"this benchmark has no reward {reward!r}: choose one of {', '.join(settings.rewards)}")
        if not 1 <= probes <= settings.pool:
            raise SettingsError(f"this benchmark has {settings.pool} texts of each prompt: give probes of 1 to that")
        known = Outcomes(settings, traces)
        budgets = tuple(sorted(budget for budget in settings.budgets if budget >= probes))
        if len(known.puzzles) < 2 or not budgets:
            raise SettingsError(
                f"a table needs two finished prompts and a budget of {probes} probes or more: let the benchmark go on"
            )
        pools = [known.pools[number] for number in known.puzzles]
        plain = np.array([np.mean(pool["lengths"]) for pool in pools])
        found: list[tuple[str, Any, Any]] = []
        for cell in cells(settings):
            method, judged, n = cell
            if method in (GREEDY, "pass@n") or judged not in ("", reward) or (method in POOLED and n < probes):
                continue
            spec = settings.spec(_POOLED.get(method, method), n, reward)
            each = known.of(cell)
            anew = 0 if isinstance(resolve("search", spec), Sampled) else probes * plain
            found.append((spec, [one["right"] for one in each], np.array([one["tokens"] for one in each]) + anew))
        if not found:
            raise SettingsError("this benchmark has no search to choose among: give it --methods besides pass@n")
        return cls(
            scorer=reward_of(reward, settings.asked),
            probes=probes,
            budgets=budgets,
            strategies=tuple(spec for spec, _, _ in found),
            right=np.array([right for _, right, _ in found], dtype=np.float64),
            tokens=np.array([tokens for _, _, tokens in found]),
            plain=plain,
            easy=np.array([np.mean(pool["scores"][reward][:probes]) for pool in pools]),
            truly=np.array([np.mean(pool["right"]) for pool in pools]),
        )

    def part(self, prompts: np.ndarray) -> Fold:
        """What is known of some of the prompts."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {name: values[name][..., prompts] for name in ("right", "tokens", "plain", "easy", "truly")}
        return Fold(**values)

    def best(self, prompts: np.ndarray, budget: int) -> int:
        """The strategy that is right most often on these prompts within the budget, the cheapest among equals."""
        allowed = budget * self.plain[prompts].mean() * (1 + 1e-9)
        right, tokens = self.right[:, prompts].mean(axis=1), self.tokens[:, prompts].mean(axis=1)
        within = [number for number in range(len(right)) if tokens[number] <= allowed]
        if not within:
            raise SettingsError(
                f"no search of this benchmark keeps within the tokens of {budget} texts: add smaller ones"
            )
        return min(within, key=lambda number: (-round(float(right[number]), 9), float(tokens[number]), number))


def fitted(fold: Fold, bins: int, *, model: str = "", facts: dict[str, Any] | None = None) -> Allocation:
    """The table of the best strategies by bin and budget; a pure function of what is known of these prompts."""
    return _fitted(fold, fold.easy, bins, model, facts or {})


def _fitted(fold: Fold, easy: np.ndarray, bins: int, model: str, facts: dict[str, Any]) -> Allocation:
    if bins < 1:
        raise SettingsError(f"a table needs at least one bin, not {bins}")
    edges = tuple(float(edge) for edge in np.quantile(easy, np.arange(1, bins) / bins))
    places = np.searchsorted(edges, easy, side="right")
    everywhere = np.arange(len(easy))
    choices = []
    for place in range(bins):
        # Where scores are few, some bins have nobody in them.
        prompts = everywhere[places == place] if (places == place).any() else everywhere
        choices.append(tuple(fold.best(prompts, budget) for budget in fold.budgets))
    return Allocation(fold.scorer, fold.probes, edges, fold.budgets, fold.strategies, tuple(choices), model, facts)


def crossed(fold: Fold, bins: int) -> list[dict[str, float]]:
    """By budget, each half of the prompts by what was fitted on the other: accuracy and tokens of the table.

    known: accuracy of a table by the true shares of right texts, which nobody knows; single: of one strategy for all.
    """
    halves = [fold.part(np.arange(first, len(fold.plain), 2)) for first in (0, 1)]
    found = []
    for number, budget in enumerate(fold.budgets):
        sums = {"accuracy": 0.0, "tokens": 0.0, "known": 0.0, "single": 0.0}
        for ours, theirs in (halves, halves[::-1]):
            table = _fitted(theirs, theirs.easy, bins, "", {})
            known = _fitted(theirs, theirs.truly, bins, "", {})
            single = theirs.best(np.arange(len(theirs.plain)), budget)
            for prompt in range(len(ours.plain)):
                chosen = table.choices[table.bin(ours.easy[prompt])][number]
                sums["accuracy"] += ours.right[chosen, prompt]
                sums["tokens"] += ours.tokens[chosen, prompt]
                sums["known"] += ours.right[known.choices[known.bin(ours.truly[prompt])][number], prompt]
                sums["single"] += ours.right[single, prompt]
        found.append({"budget": budget} | {name: round(value / len(fold.plain), 4) for name, value in sums.items()})
    return found
