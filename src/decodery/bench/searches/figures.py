"""Accuracy and cost of searches, with intervals, as rows, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ..metrics import wilson

Row = dict[str, Any]
_DRAWS = 2000
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_LINE, _LINES = 34, 3
"""Characters of a line of the legend, and lines of a search there."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 240, 20, 50


def rows(records: Sequence[Mapping[str, Any]], runs: Sequence[tuple[str, int]]) -> list[Row]:
    """By search and budget: accuracy, what it gains over the first one, and what a problem costs.

    The gain is that on the problems that both were run on; its 95 % interval is a bootstrap over problems. Where that
    lies above 0, a row has its cost: tokens that a problem takes beyond the first one's, per percentage point gained.

    Args:
        records: One a problem and run.
        runs: Searches and budgets, in order; the first is the baseline.
    """
    by_run: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {run: {} for run in runs}
    for record in records:
        run = record["search"], record["budget"]
        if run in by_run:
            by_run[run][record["problem"]] = record
    baseline = by_run[runs[0]]
    found = []
    for (search, budget), own in by_run.items():
        if not own:
            continue
        right, count = sum(bool(each["right"]) for each in own.values()), len(own)
        low, high = wilson(right, count)
        row: Row = {"search": search, "budget": budget, "problems": count, "right": right}
        row |= {"accuracy": right / count, "low": low, "high": high}
        for name in ("tokens", "scorer_calls", "seconds"):
            row[name] = sum(float(each[name]) for each in own.values()) / count
        row["failed"] = sum(bool(each.get("error")) for each in own.values())
        if both := sorted(own.keys() & baseline.keys()):
            gains = np.array([float(own[name]["right"]) - float(baseline[name]["right"]) for name in both])
            drawn = np.random.default_rng(0).integers(len(gains), size=(_DRAWS, len(gains)))
            means = gains[drawn].mean(axis=1)
            row["gain"] = float(gains.mean())
            row["gain_low"], row["gain_high"] = (float(each) for each in np.percentile(means, (2.5, 97.5)))
            if row["gain_low"] > 0:
                more = sum(float(own[name]["tokens"]) - float(baseline[name]["tokens"]) for name in both) / len(both)
                row["tokens_per_point"] = more / (100 * row["gain"])
        found.append(row)
    return found


def table(found: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| search | budget | problems | accuracy [95 %] | gain over the first [95 %] | tokens | scored texts | s | "
        "tokens per point |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        gain = (
            f"{100 * row['gain']:+.0f} [{100 * row['gain_low']:+.0f}, {100 * row['gain_high']:+.0f}]"
            if "gain" in row
            else ""
        )
        accuracy = f"{100 * row['accuracy']:.0f} % [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
        cells = (in_a_cell(row["search"]), row["budget"] or "", row["problems"], accuracy, gain)
        cost = f"{row['tokens_per_point']:.0f}" if "tokens_per_point" in row else ""
        spent = f"{row['tokens']:.0f} | {row['scorer_calls']:.1f} | {row['seconds']:.1f} | {cost}"
        lines.append(f"| {' | '.join(map(str, cells))} | {spent} |")
    return "\n".join(lines)


def in_a_cell(search: str) -> str:
    """A search's text in a cell of a Markdown table, which no line feed or bar of its own may end."""
    shown = search.replace("\n", "\\n").replace("|", "\\|")
    return f"`{shown}`"


def plot(found: Sequence[Row]) -> str:
    """Accuracy against tokens of a problem as SVG, a line for each search with the intervals of its points."""
    tokens = [max(row["tokens"], 1.0) for row in found] or [1.0]
    least, most = math.log2(min(tokens)) - 0.3, math.log2(max(tokens)) + 0.3
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + width * (math.log2(max(value, 1.0)) - least) / (most - least)

    def y(share: float) -> float:
        return _TOP + height * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{_LEFT} {y(share):.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    parts += [
        f'<text x="{x(2**power):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{2**power}</text>'
        for power in range(math.ceil(least), math.floor(most) + 1)
    ]
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">tokens of a problem</text>')
    legend, searches = 0, list(dict.fromkeys(row["search"] for row in found))
    for number, search in enumerate(searches):
        # Searches among the same samples have the same points: those drawn first stand out on both sides.
        beneath = len(searches) - 1 - number
        colour = _COLOURS[number % len(_COLOURS)]
        points = sorted((row for row in found if row["search"] == search), key=lambda row: row["tokens"])
        line = " ".join(f"{x(row['tokens']):.1f},{y(row['accuracy']):.1f}" for row in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{2 + 2 * beneath}"/>')
        for row in points:
            each = row["tokens"]
            bar = f"M{x(each):.1f} {y(row['low']):.1f}V{y(row['high']):.1f}"
            parts.append(f'<path d="{bar}" stroke="{colour}" opacity="0.4"/>')
            parts.append(
                f'<circle cx="{x(each):.1f}" cy="{y(row["accuracy"]):.1f}" r="{3 + beneath}" fill="{colour}"/>'
            )
        for place, piece in enumerate(_pieces(search)):
            at = _TOP + 14 + 15 * place + legend
            parts.append(f'<text x="{_WIDTH - _RIGHT + 12}" y="{at}" fill="{colour}">{escape(piece)}</text>')
        legend += 15 * len(_pieces(search)) + 6
    return "\n".join([*parts, "</svg>\n"])


def _pieces(search: str) -> list[str]:
    """A search's text in lines of the legend."""
    lines = [search[begin : begin + _LINE] for begin in range(0, len(search), _LINE)]
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"{lines[_LINES - 1][:-1]}…"]
