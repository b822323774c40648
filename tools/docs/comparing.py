"""What `decodery search-bench` found on code and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from figures import ROOT, load, table

from decodery.bench.searches.figures import in_a_cell, plot

_BENCHES = {
    "humaneval": "programs, 0.5B",
    "humaneval-8": "programs, 0.5B, the first 29",
    "humaneval-1.5b": "programs, 1.5B",
    "gsm8k": "arithmetic, 0.5B",
    "gsm8k-rated": "arithmetic, 0.5B, rated by itself",
}
_PLOTTED = "gsm8k", "humaneval"


def bench(name: str) -> str:
    """Accuracy, gain over one text and cost of each search; of one text once for as many problems."""
    found = load(f"search-bench-{name}")["rows"]
    single = {row["problems"]: row for row in reversed(found) if row["budget"] == 1}
    shown = [
        [
            in_a_cell(row["search"]),
            str(row["budget"] or ""),
            str(row["problems"]),
            f"{100 * row['accuracy']:.0f} % [{100 * row['low']:.0f}, {100 * row['high']:.0f}]",
            _gain(row),
            f"{row['tokens']:.0f}",
            f"{row['scorer_calls']:.1f}",
        ]
        for row in found
        if row["budget"] != 1 or row is single[row["problems"]]
    ]
    head = ["search", "budget", "problems", "accuracy [95 %]", "gain over the first [95 %]", "tokens", "scored texts"]
    return table(head, shown)


def pays() -> str:
    """What gains or loses beyond chance, and the tokens that a problem takes beyond one text for each point."""
    shown = []
    for name, about in _BENCHES.items():
        found = load(f"search-bench-{name}")["rows"]
        for row in found[1:]:
            if row["gain_low"] <= 0 <= row["gain_high"]:
                continue
            # Searches by examples were run on fewer problems.
            single = next(each for each in found if each["budget"] == 1 and each["problems"] == row["problems"])
            cost = f"{(row['tokens'] - single['tokens']) / (100 * row['gain']):.0f}" if row["gain_low"] > 0 else ""
            cells = (in_a_cell(row["search"]), str(row["budget"] or ""), str(row["problems"]))
            shown.append([about, *cells, _gain(row), cost])
    return table(["problems, model", "search", "budget", "problems", "gain [95 %]", "tokens per point"], shown)


def _gain(row: dict[str, Any]) -> str:
    return f"{100 * row['gain']:+.0f} [{100 * row['gain_low']:+.0f}, {100 * row['gain_high']:+.0f}]"


def accuracy(name: str) -> str:
    """Accuracy against tokens, as the command draws it."""
    return plot(load(f"search-bench-{name}")["rows"])


SECTIONS: dict[str, Callable[[], str]] = {
    **{f"bench-{name.replace('.', '-')}": partial(bench, name) for name in _BENCHES},
    "bench-pays": pays,
}
PLOTS: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "results" / f"search-bench-{name}.svg": partial(accuracy, name) for name in _PLOTTED
}
