"""What a benchmark of cache policies says: tables by budget, and a picture of every figure over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import Any

from .settings import BOUNDS

Row = dict[str, Any]

TASKS = ("needle known", "needle unknown", "lines known", "lines unknown", "recall known", "recall unknown")
_PLAIN = {
    "kl": 3, "top-1": 2, "nll": 3, "error": 3, "error closed": 3, "mass": 3, "mass after the sinks": 3, "recall": 2,
    "first difference": 0, "resident": 2, "read": 2, "MiB held": 1, "MiB read": 1, "tokens per pass": 2,
}  # fmt: skip
"""Figures besides tasks, with their digits."""
PANELS = (*TASKS, "top-1", "mass after the sinks", "recall", "error")
"""Figures between 0 and 1 that are drawn over budgets."""
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#882255", "#E41A1C", "#332288", "#999933"),
    *("#66A61E", "#8C564B", "#17BECF", "#7F3C8D", "#F2B701", "#3969AC"),
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _ACROSS = 190, 150, 34, 30, 4


def figure(row: Row, name: str) -> float | None:
    """A row's figure as a number: of a task the share that is solved, of several texts their median."""
    value = row.get(name)
    if isinstance(value, list):
        return value[0] / max(value[1], 1) if name in TASKS else float(median(value))
    return None if value is None else float(value)


def shown(row: Row, name: str) -> str:
    """The same as it stands in a table."""
    value = row.get(name)
    if value is None:
        return ""
    if name in TASKS:
        return "{}/{}".format(*value)
    return f"{figure(row, name):.{_PLAIN[name]}f}"


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """For every budget its title, head and cells, of the figures that any of its rows has."""
    found = []
    for budget in sorted({row["budget"] for row in rows}):
        own = [row for row in rows if row["budget"] == budget]
        names = [name for name in (*TASKS, *_PLAIN) if any(name in row for row in own)]
        cells = [[row["policy"], *(shown(row, name) for name in names)] for row in own]
        found.append((f"Budget {budget:g}", ["", *names], cells))
    return found


def table(result: dict[str, Any]) -> str:
    """A line of what was measured, and a table for each budget, as Markdown."""
    from decodery.bench.report import markdown

    full = ", ".join("{} {} of {}".format(task, *counts) for task, counts in result["full"].items())
    parts = [f"Cache policies of {result['model']['name']}; with all of the cache it solves {full}."]
    parts += [f"{title}:\n\n{markdown(head, cells)}" for title, head, cells in tables(result["rows"])]
    return "\n\n".join(parts)


def plot(rows: Sequence[Row]) -> str:
    """An SVG: every figure of `PANELS` over budgets, a line for each policy; uniform and oracle dashed in all."""
    budgets = sorted({row["budget"] for row in rows})
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name not in BOUNDS]
    colours = dict(zip(names, _COLOURS * (1 + len(names) // len(_COLOURS)), strict=False))
    colours |= {"uniform": "#999999", "oracle": "#222222"}
    panels = [panel for panel in PANELS if any(figure(row, panel) is not None for row in rows)]
    parts = list[str]()
    for number, panel in enumerate(panels):
        left = _LEFT + number % _ACROSS * (_WIDTH + _LEFT)
        top = _TOP + number // _ACROSS * (_HEIGHT + 2 * _TOP)
        parts += _panel(panel, rows, budgets, colours, left, top)
    width, base = _ACROSS * (_WIDTH + _LEFT) + _LEFT, -(-len(panels) // _ACROSS) * (_HEIGHT + 2 * _TOP) + _TOP
    for number, name in enumerate(
        [*names, *(bound for bound in BOUNDS if any(row["policy"] == bound for row in rows))]
    ):
        x, y = _LEFT + number % 5 * (width - _LEFT) // 5, base + number // 5 * 16
        dash = ' stroke-dasharray="4 3"' if name in BOUNDS else ""
        parts.append(f'<path d="M{x} {y - 4}h16" stroke="{colours[name]}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 21}" y="{y}">{escape(name.partition(":")[0] if "{}" in name else name)}</text>')
    height = base + 16 * (1 + (len(names) + 1) // 5)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#333333"><title>Cache policies by budget</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panel(
    panel: str, rows: Sequence[Row], budgets: Sequence[float], colours: dict[str, str], left: int, top: int
) -> list[str]:
    """One figure: budgets at even distances across, 0 to 1 up."""

    def across(budget: float) -> float:
        return left + _WIDTH * (budgets.index(budget) + 0.5) / len(budgets)

    def up(value: float) -> float:
        return top + _HEIGHT * (1 - min(max(value, 0.0), 1.0))

    parts = [f'<text x="{left}" y="{top - 8}" font-weight="600">{panel}</text>']
    for tick in (0, 0.5, 1):
        parts.append(f'<path d="M{left} {up(tick):.1f}h{_WIDTH}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{left - 5}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    base = f'y="{top + _HEIGHT + 15}" text-anchor="middle"'
    parts += [f'<text x="{across(budget):.1f}" {base}>{budget:g}</text>' for budget in budgets]
    # Dashes on a line show both.
    for name in sorted(colours, key=lambda each: each in BOUNDS):
        own = {row["budget"]: figure(row, panel) for row in rows if row["policy"] == name}
        points = [(across(budget), up(value)) for budget, value in sorted(own.items()) if value is not None]
        dash = ' stroke-dasharray="4 3"' if name in BOUNDS else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if points:
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[name]}" stroke-width="1.6"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colours[name]}"/>' for x, y in points]
    return parts


def page(result: dict[str, Any]) -> str:
    """The plot and the tables, in an HTML file that needs nothing else."""
    name = escape(str(result["model"]["name"]))
    return (
        f'<!doctype html><meta charset="utf-8"><title>{name}: cache policies, measured</title>'
        f"<h1>{name}: what cache policies lose by budget</h1>{plot(result['rows'])}<pre>{escape(table(result))}</pre>\n"
    )
