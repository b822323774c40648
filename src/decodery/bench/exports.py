"""A result's figures for other programs and papers: CSV, a LaTeX table, a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from typing import Any

from .report import head, lines, speed
from .result import Result
from .rows import ALL

_FIGURES = (
    "prompts", "new_tokens", "passes", "tokens_per_pass", "rows_per_token", "tokens_per_second", "speedup",
    "speedup_low", "speedup_high", "right", "answered", "right_low", "right_high",
)  # fmt: skip
_NAMES = ("workload", "split", "category", "method", "dtype", "temperature")
_COUNTS = ("checked", "identical", "excused")
_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "-": "{-}", "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "–": "--",
}  # fmt: skip
_LABEL, _BAR, _LINE, _VALUE = 330, 300, 26, 150


def to_csv(result: Result) -> str:
    """Every row of a benchmark of methods, with a line of names first; what a method has not is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_NAMES, *_FIGURES, *_COUNTS, "note"])
    for row in result["rows"]:
        figures = [row.get(name) for name in (*_NAMES, *_FIGURES)]
        writer.writerow([*figures, *(row["lossless"][name] for name in _COUNTS), row["note"]])
    return text.getvalue()


def to_latex(result: Result) -> str:
    """A table for each workload, of its sums, for the package booktabs."""
    return "\n\n".join(_table(sums) for sums in _sums(result)) + "\n"


def _table(sums: Sequence[dict[str, Any]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(_LATEX.get(letter, letter) for letter in cell) for cell in cells) + r" \\"

    names = head(sums)
    body = "\n".join(line(each) for each in lines(sums))
    columns = f"l{'r' * (len(names) - 1)}"
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{line(names)}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}"
    )


def to_svg(result: Result) -> str:
    """Bars of the speed-ups over plain decoding with their intervals, a group for each workload."""
    parts, top = list[str](), 10
    groups = _sums(result)
    longest = max((row["speedup_high"] or 0.0 for sums in groups for row in sums), default=0.0) or 1.0
    for sums in groups:
        parts.append(f'<text x="8" y="{top + 16}" font-weight="bold">{escape(str(sums[0]["workload"]))}</text>')
        top += _LINE
        for row in sums:
            parts += _bar(row, top, _BAR / longest)
            top += _LINE
        top += 8
    one = _LABEL + _BAR / longest
    parts.append(f'<path d="M{one:.1f} 10V{top - 8}" stroke="currentColor" stroke-dasharray="3 3"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LABEL + _BAR + _VALUE} {top}" '
        'font-family="sans-serif" font-size="13" fill="currentColor">' + "".join(parts) + "</svg>\n"
    )


def _bar(row: dict[str, Any], top: int, scale: float) -> list[str]:
    middle = top + _LINE / 2
    label = f'<text x="{_LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(_short(row["method"]))}</text>'
    if row["speedup"] is None:
        return [label, f'<text x="{_LABEL}" y="{middle + 4}">{escape(row["note"] or "not measured")}</text>']
    low, high, end = (_LABEL + scale * row[name] for name in ("speedup_low", "speedup_high", "speedup"))
    return [
        label,
        f'<rect x="{_LABEL}" y="{top + 4}" width="{end - _LABEL:.1f}" height="{_LINE - 8}" fill="#4a7ab5"/>',
        f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="currentColor" stroke-width="2"/>',
        f'<text x="{high + 8:.1f}" y="{middle + 4}">{speed(row)}</text>',
    ]


def _short(name: str) -> str:
    return name if len(name) <= 46 else f"{name[:45]}…"


def _sums(result: Result) -> list[list[dict[str, Any]]]:
    """The rows over all categories, by workload and split."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["category"] == ALL:
            groups.setdefault((row["workload"], row["split"]), []).append(row)
    return list(groups.values())
