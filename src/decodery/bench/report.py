"""A result as a person reads it: a self-contained page, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from . import structured
from .load import show as load
from .result import LOAD, PASSES, Result, dump, write
from .rows import ALL

_SCRIPTS = ("base.js", "charts.js", "timeline.js", "load.js", "main.js")
_TITLES = {PASSES: "passes", LOAD: "serving"}


def page(result: Result, scripts: Sequence[str] = (), what: str = "") -> str:
    """One HTML file that needs nothing else: the result inside it, and what draws it.

    Args:
        result: A result of any kind.
        scripts: JavaScript with a function `PAGES.kind` each, for kinds that are not of this package.
        what: What was measured, in the title; by default by the kind.
    """
    folder = files(__package__) / "page"
    *before, last = [(folder / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    parts = {
        "title": escape(f"{result['model']['name']}: {what or _TITLES.get(result['kind'], 'decoding')}, measured"),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join([*before, *scripts, last]),
        "data": _embedded(result),
    }
    # The data comes last: it may hold any text, even that of a placeholder.
    text = (folder / "page.html").read_text(encoding="utf-8")
    for name, value in parts.items():
        text = text.replace("{{" + name + "}}", value, 1)
    return text


def save(result: Result, out: Path | None) -> None:
    """Write the result and its page to the folder `out`, if there is one."""
    if out is not None:
        write(out / "results.json", dump(result))
        write(out / "report.html", page(result))


def _embedded(result: Result) -> str:
    """The result without what no plot shows, so written that no text in it can end the script element."""
    shown = {name: value for name, value in result.items() if name not in ("requests", "done")}
    if "generations" in result:
        kept = [generation for generation in result["generations"] if "timeline" in generation]
        names = ("method", "workload", "category", "question", "timeline")
        shown["generations"] = [{name: generation[name] for name in names} for generation in kept]
    return json.dumps(shown, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def table(result: Result, *, categories: bool = False) -> str:
    """The result's figures as Markdown: a table per workload under a line that names it, or one of pass costs or load.

    categories: with a table of speed-ups by category after each.
    """
    if result["kind"] == PASSES:
        return _passes_table(result)
    if result["kind"] == LOAD:
        return f"{load.title(result)}:\n\n{markdown(load.HEAD, [load.cells(row) for row in result['rows']])}"
    parts = []
    for workload, split in dict.fromkeys((row["workload"], row["split"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["workload"], row["split"]) == (workload, split)]
        sums = [row for row in rows if row["category"] == ALL]
        parts += [f"{title(sums, result)}:", markdown(head(sums), lines(sums))]
        if held := [structured.cells(row) for row in rows if "coverage" in row]:
            parts.append(markdown(structured.HEAD, held))
        elif categories:
            parts.append(_by_category(rows))
    return "\n\n".join(parts)


def title(sums: Sequence[dict[str, Any]], result: Result) -> str:
    """What the rows of a workload were measured on."""
    first, settings = sums[0], result["settings"]
    how = f"temperature {first['temperature']:g}, at most {settings['max_new_tokens']} tokens"
    rounds = f"{settings['rounds']} round{'s' if settings['rounds'] > 1 else ''}"
    return f"{first['workload']}, {first['split']}, {first['prompts']} prompts, {how}, {rounds}"


_HEAD = ("method", "precision", "tokens per pass", "rows per token", "tokens/s", "speed-up (95 %)", "same text")
_RIGHT = "right (95 %)"


def head(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The columns of a table of these rows: with right answers where something tells which are."""
    return (*_HEAD, _RIGHT) if any("right" in row for row in rows) else _HEAD


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The rows' figures under `head`."""
    told = len(head(rows)) > len(_HEAD)
    return [[*_cells(row), *([right(row)] if told else [])] for row in rows]


def right(row: dict[str, Any]) -> str:
    """The share of right answers with its interval."""
    if "right" not in row:
        return ""
    return f"{100 * row['right'] / row['answered']:.0f} % ({100 * row['right_low']:.0f}–{100 * row['right_high']:.0f})"


def _cells(row: dict[str, Any]) -> list[str]:
    """A row's figures under `_HEAD`; a note in their place where it was not measured."""
    if not row["prompts"]:
        return [row["method"], row["note"], *[""] * (len(_HEAD) - 2)]
    return [
        row["method"],
        row["dtype"] or "",
        _number(row["tokens_per_pass"], 2),
        _number(row["rows_per_token"], 2),
        _number(row["tokens_per_second"], 1),
        speed(row),
        same(row),
    ]


def speed(row: dict[str, Any]) -> str:
    if row["speedup"] is None:
        return ""
    # One question in one round has no spread, and plain decoding over itself neither.
    if row["speedup_low"] == row["speedup_high"]:
        return f"{row['speedup']:.2f}"
    return f"{row['speedup']:.2f} ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"


def same(row: dict[str, Any]) -> str:
    """How many outputs were plain decoding's."""
    counts = row["lossless"]
    if not counts["checked"]:
        return ""
    excused = f" + {counts['excused']} near-ties" if counts["excused"] else ""
    return f"{counts['identical']}{excused} / {counts['checked']}"


def _by_category(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["method"] for row in rows if row["speedup"] is not None))
    categories = list(dict.fromkeys(row["category"] for row in rows))
    found = {(row["method"], row["category"]): row for row in rows}
    body = [
        [category.replace("_", " "), *(_number(found.get((name, category), {}).get("speedup"), 2) for name in names)]
        for category in categories
    ]
    return markdown(("category", *names), body)


def _passes_table(result: Result) -> str:
    precisions = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    found = {(row["precision"], row["rows"]): row for row in result["rows"]}
    head = ["rows", *(f"{name}: {what}" for name in precisions for what in ("ms", "of bandwidth", "times 1 row"))]
    body = []
    for count in sorted({row["rows"] for row in result["rows"]}):
        line = [str(count)]
        for name in precisions:
            row = found.get((name, count))
            line += ["", "", ""] if row is None else [
                f"{row['ms']:.2f}", f"{100 * row['bandwidth_share']:.0f} %", f"{row['ratio_to_one']:.2f}"
            ]  # fmt: skip
        body.append(line)
    return markdown(head, body)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table, all columns but the first set to the right."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, *body)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
