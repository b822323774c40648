"""The generated part of the documentation about cache policies, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import ROOT, load, table

from decodery.bench.contexts.figures import plot, tables


def _rows() -> list[dict[str, Any]]:
    """A row for every policy and budget that was measured."""
    found = load("long-context")["policies"]
    rows = [
        {"policy": name, "budget": float(budget), **each}
        for name, budgets in found.items()
        for budget, each in budgets.items()
    ]
    return sorted(rows, key=lambda row: row["budget"])


def long_context() -> str:
    """What every policy loses, by budget."""
    rows = _rows()
    numbers = [row for row in rows if row["policy"].startswith("quantized")]
    exact = [row for row in rows if row["budget"] == 1 and row not in numbers]
    parts = [f"`{load('long-context')['command']}`", "![What cache policies lose by budget](results/long-context.svg)"]
    for title, head, cells in tables([row for row in rows if row["budget"] < 1]):
        parts += [f"**{title}**", table(head, cells)]
    for _, head, cells in tables(numbers):
        parts += ["**Whole numbers**", table(head, cells)]
    if exact:
        worst = max(row["kl"] for row in exact)
        parts.append(f"Under a budget of 1 the largest drift of {len(exact)} policies was {worst:g} nats.")
    return "\n\n".join(parts)


def picture() -> str:
    """The same over budgets, with the line of even distances and that of the oracle in every panel."""
    return plot([row for row in _rows() if not row["policy"].startswith("quantized")])


SECTIONS: dict[str, Callable[[], str]] = {"long-context": long_context}
PLOTS: dict[Path, Callable[[], str]] = {ROOT / "docs" / "results" / "long-context.svg": picture}
