"""What a benchmark of ways of filling canvases says: a table, a plot, and two figures in place of a curve."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .settings import REFERENCE

Row = dict[str, Any]
_SHARE = 0.95
"""What a method must keep of the reference's right answers to count as one without loss."""
_WIDTH, _HEIGHT, _EDGE = 250, 170, 34


def totals(rows: Sequence[Row]) -> list[Row]:
    """A row for each method, over all tasks: each task's share of right answers, and the mean costs of a canvas."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        count = sum(row["prompts"] for row in own)
        passes = sum(row["passes"] * row["prompts"] for row in own)

        def mean(name: str, own: list[Row] = own, count: int = count) -> float:
            return sum(row[name] * row["prompts"] for row in own) / count

        found.append(
            {
                "method": method,
                **{row["task"]: round(row["right"] / row["prompts"], 3) for row in own},
                "passes": round(mean("passes"), 2),
                "rows": round(mean("rows"), 1),
                "tokens_per_pass": round(
                    sum(row["tokens_per_pass"] * row["passes"] * row["prompts"] for row in own) / passes, 2
                ),
                "tau": round(mean("tau"), 2),
                "distinct": round(_mean([row["distinct"] for row in own if "distinct" in row]), 1),
            }
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def fastest(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, float]:
    """By task the most tokens a pass of those methods that keep 95 % of the reference's right answers."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = {row["method"]: row for row in rows if row["task"] == task}
        least = _SHARE * own[REFERENCE]["right"] / own[REFERENCE]["prompts"]
        kept = [own[name]["tokens_per_pass"] for name in methods if own[name]["right"] / own[name]["prompts"] >= least]
        found[task] = max(kept, default=own[REFERENCE]["tokens_per_pass"])
    return found


def adaptivity_gap(rows: Sequence[Row]) -> float | None:
    """How much faster the best threshold of each task is than the best one for all; None without two thresholds.

    A threshold that loses more than 5 % of some task counts there with the reference's tokens a pass.
    """
    thresholds = [name for name in dict.fromkeys(row["method"] for row in rows) if name.startswith("threshold")]
    if len(thresholds) < 2:
        return None
    best = _mean(list(fastest(rows, thresholds).values()))
    return best / max(_mean(list(fastest(rows, [each]).values())) for each in thresholds)


def table(result: dict[str, Any]) -> str:
    """A line of what was measured, and a row for each method, as Markdown."""
    from decodery.bench.report import markdown

    settings, found = result["settings"], totals(result["rows"])
    head = list(found[0]) if found else []
    lines = [[f"`{row['method']}`", *(f"{row[name]:g}" for name in head[1:])] for row in found]
    gap = adaptivity_gap(result["rows"])
    said = "" if gap is None else f" The best threshold of each task is {gap:.2f} times as fast as the best for all."
    title = f"{settings['prompts']} prompts of each task, canvases of {result['places']} places:"
    return f"{title}\n\n{markdown([name.replace('_', ' ') for name in head], lines)}\n\n{said.strip()}".strip()


def plot(result: dict[str, Any]) -> str:
    """An SVG: for each task the share of right answers over tokens a pass, a number for each method."""
    rows = result["rows"]
    tasks, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "method"))
    most = max((row["tokens_per_pass"] for row in rows), default=1.0)
    columns, parts = 5, list[str]()
    for number, task in enumerate(tasks):
        left, top = number % columns * _WIDTH, number // columns * _HEIGHT
        right, bottom = left + _WIDTH - 10, top + _HEIGHT - _EDGE
        parts.append(f'<text x="{left + _EDGE}" y="{top + 14}" font-weight="bold">{escape(task)}</text>')
        parts.append(
            f'<path d="M{left + _EDGE} {top + 20}V{bottom}H{right}" fill="none" stroke="currentColor"/>'
            f'<text x="{left + 8}" y="{top + 30}">1</text><text x="{left + 8}" y="{bottom}">0</text>'
            f'<text x="{right - 30}" y="{bottom + 14}">{most:.1f}</text>'
        )
        for row in (row for row in rows if row["task"] == task):
            x = left + _EDGE + row["tokens_per_pass"] / most * (right - left - _EDGE - 12)
            y = bottom - row["right"] / row["prompts"] * (bottom - top - 30)
            parts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{methods.index(row["method"]) + 1}'
                f"<title>{escape(row['method'])}</title></text>"
            )
    base = -(-len(tasks) // columns) * _HEIGHT
    legend = [
        f'<text x="{8 + number % 3 * 420}" y="{base + 20 + number // 3 * 16}">{number + 1} {escape(name)}</text>'
        for number, name in enumerate(methods)
    ]
    height = base + 30 + -(-len(methods) // 3) * 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * _WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11" fill="currentColor">{"".join(parts + legend)}</svg>'
    )


def page(result: dict[str, Any]) -> str:
    """The plot and the table, in an HTML file that needs nothing else."""
    name = escape(str(result["model"]["name"]))
    return (
        f'<!doctype html><meta charset="utf-8"><title>{name}: canvases, measured</title>'
        f"<h1>{name}: right answers over tokens a pass</h1>{plot(result)}<pre>{escape(table(result))}</pre>\n"
    )
