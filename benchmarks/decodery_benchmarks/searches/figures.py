"""From traces to figures: accuracy with its interval, and what was spent for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..intervals import interval
from .pools import best_within, estimated
from .settings import GREEDY, POOLED, SCORED, Cell, SearchSettings

COSTS = ("tokens", "scorer_calls", "depth")

Row = dict[str, Any]


def cells(settings: SearchSettings) -> Iterator[Cell]:
    """All that is measured, in order."""
    yield GREEDY, "", 1
    for method in settings.methods:
        asks = method in SCORED or "{scorer}" in method
        widths = settings.budgets if method in POOLED or "{n}" in method else (1,)
        for reward in settings.rewards if asks else ("",):
            for budget in widths:
                yield method, reward, budget


class Outcomes:
    """What came of every cell on the puzzles that all cells have. puzzles: their numbers; pools: by number."""

    def __init__(self, settings: SearchSettings, traces: Sequence[dict[str, Any]]) -> None:
        self.pools = {trace["puzzle"]: trace for trace in traces if trace["kind"] == "pool"}
        self._runs = {(t["method"], t["reward"], t["n"], t["puzzle"]): t for t in traces if t["kind"] == "run"}
        asked = list(cells(settings))
        self.puzzles = [
            number
            for number in sorted(self.pools)
            if all(cell[0] in POOLED or (*cell, number) in self._runs for cell in asked)
        ]

    def of(self, cell: Cell) -> list[Row]:
        """By puzzle: whether a cell is right there, or how often, and what that costs."""
        method, reward, budget = cell
        if method in POOLED:
            return [estimated(self.pools[number], method, reward, budget) for number in self.puzzles]
        return [self._runs[(*cell, number)] for number in self.puzzles]


def rows(settings: SearchSettings, traces: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for every cell, over the puzzles that all of them have.

    accuracy, low, high: with a 95 % bootstrap interval over puzzles; tokens, scorer_calls, depth: means; gain and its
    interval: over one plain sample, on the same puzzles, paired; even, with its interval, of a search that is run with
    a reward: over best-of-n with that reward at as many tokens. puzzles: how many.
    """
    known = Outcomes(settings, traces)
    found: list[Row] = []
    if not known.puzzles:
        return found
    count = len(known.puzzles)
    plain = np.array([one["right"] for one in known.of(("pass@n", "", 1))])
    for cell in cells(settings):
        method, reward, budget = cell
        each = known.of(cell)
        right = np.array([one["right"] for one in each], dtype=np.float64)
        low, high = interval(right, seed=settings.seed)
        gain_low, gain_high = interval(right - plain, seed=settings.seed)
        found.append(
            {
                "method": method,
                "reward": reward,
                "n": budget,
                "puzzles": count,
                "accuracy": round(float(right.mean()), 4),
                "low": low,
                "high": high,
                "gain": round(float((right - plain).mean()), 4),
                "gain_low": gain_low,
                "gain_high": gain_high,
                **_even(known, cell, right, settings.seed),
                **{name: round(float(np.mean([one[name] for one in each])), 2) for name in COSTS},
            }
        )
    return found


def _even(known: Outcomes, cell: Cell, right: np.ndarray, seed: int) -> Row:
    """What a search that is run gains over best-of-n at equal tokens; nothing for what has no reward or is no run."""
    method, reward, _ = cell
    if not reward or method in POOLED:
        return {}
    each = zip(known.puzzles, known.of(cell), strict=True)
    beside = np.array([best_within(known.pools[number], reward, one["tokens"]) for number, one in each])
    low, high = interval(right - beside, seed=seed)
    return {"even": round(float((right - beside).mean()), 4), "even_low": low, "even_high": high}


HEAD = (
    *("method", "reward", "n", "accuracy (95 %)", "over one sample", "over best-of-n at equal tokens"),
    *("tokens", "scorer calls", "depth"),
)


def shown(row: Row) -> list[str]:
    """A row's figures under `HEAD`."""
    return [
        row["method"],
        row["reward"],
        str(row["n"]),
        f"{row['accuracy']:.3f} ({row['low']:.3f}–{row['high']:.3f})",
        f"{row['gain']:+.3f} ({row['gain_low']:+.3f} to {row['gain_high']:+.3f})",
        f"{row['even']:+.3f} ({row['even_low']:+.3f} to {row['even_high']:+.3f})" if "even" in row else "",
        f"{row['tokens']:.0f}",
        f"{row['scorer_calls']:.1f}",
        f"{row['depth']:.0f}",
    ]


def title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    puzzles = max((row["puzzles"] for row in result["rows"]), default=0)
    return (
        f"{result['model']['name']} on {puzzles} puzzles of {settings['puzzle']}, temperature "
        f"{settings['temperature']:g}, a pool of {settings['pool']}"
    )
