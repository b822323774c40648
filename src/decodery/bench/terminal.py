"""A result in a terminal: tables, a sketch of the cost of passes, a bar while it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import structured
from .report import head, lines, speed, title
from .result import Result
from .rows import ALL
from .settings import PLAIN


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error where a person is watching, else silence."""
    console = Console(stderr=True)
    columns = (BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report


def show(result: Result) -> None:
    """Per workload the sums of all methods, then speed-ups by category, then whatever was left out."""
    console = screen()
    for workload, split in dict.fromkeys((row["workload"], row["split"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["workload"], row["split"]) == (workload, split)]
        sums = [row for row in rows if row["category"] == ALL]
        table = _table(title(sums, result))
        for name in head(sums):
            left = name in ("method", "precision")
            table.add_column(
                name, justify="left" if left else "right", overflow="fold", no_wrap=name.startswith("speed")
            )
        requests = result["settings"].get("requests", ())
        for row, line in zip(sums, lines(sums), strict=True):
            # Options may well change the text; a drafter may not.
            wrong = _differs(row) and row["method"].removesuffix(" (cold)") not in requests
            table.add_row(*line, style="red" if wrong else None)
        console.print(table)
        if any("coverage" in row for row in rows):
            console.print(_structured(rows))
        elif len({row["category"] for row in rows}) > 2 and any(row["method"] != PLAIN for row in rows):
            console.print(_categories(rows))
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)
    if not result["complete"]:
        console.print("interrupted: these are the questions that every method has finished", style="yellow")


def _structured(rows: list[dict[str, Any]]) -> Table:
    table = _table("answers held to a JSON schema, by dataset")
    for name in structured.HEAD:
        table.add_column(name, justify="left" if name in ("dataset", "method") else "right", overflow="fold")
    for row in rows:
        if "coverage" in row:
            table.add_row(*structured.cells(row))
    return table


def _differs(row: dict[str, Any]) -> bool:
    """Whether one of our own methods wrote something else than plain decoding."""
    counts = row["lossless"]
    return row["share"]["score"] is not None and counts["checked"] > counts["identical"] + counts["excused"]


_COLUMNS = 8
"""Methods side by side that can still be read in a terminal."""


def _categories(rows: list[dict[str, Any]]) -> Table:
    found = {(row["method"], row["category"]): row for row in rows}
    names = list(dict.fromkeys(row["method"] for row in rows if row["speedup"] is not None and row["method"] != PLAIN))
    what = "speed-up by category (tokens per pass)"
    if len(names) > _COLUMNS:
        fastest = sorted(names, key=lambda name: -(found[name, ALL]["speedup"] or 0.0))[:_COLUMNS]
        names = [name for name in names if name in fastest]
        what += f" of the {_COLUMNS} fastest; the page and the results file have all"
    table = _table(what)
    for name in ("category", *names):
        table.add_column(name, justify="left" if name == "category" else "right", overflow="fold")
    for category in dict.fromkeys(row["category"] for row in rows if row["category"] != ALL):
        line = []
        for name in names:
            row = found.get((name, category))
            passes = row and row["tokens_per_pass"]
            line.append("" if not row or row["speedup"] is None else f"{row['speedup']:.2f}")
            line[-1] += f" ({passes:.2f})" if line[-1] and passes else ""
        table.add_row(category.replace("_", " "), *line)
    return table


def show_passes(result: Result) -> None:
    """The table of `decodery bench --pass` and a sketch of its times."""
    console = screen()
    table = _table(f"a pass of {result['model']['name']}; memory is read at {result['read_gb_per_s']:.1f} GB/s")
    for name in ("precision", "rows", "ms", "GB/s", "of bandwidth", "times 1 row", "time"):
        table.add_column(name, justify="left" if name in ("precision", "time") else "right")
    longest = max(row["ms"] for row in result["rows"])
    last = None
    for row in result["rows"]:
        if last not in (None, row["precision"]):
            table.add_section()
        last = row["precision"]
        bar = "█" * max(1, round(30 * row["ms"] / longest))
        figures = (f"{row['ms']:.2f}", f"{row['gb_per_s']:.1f}", f"{100 * row['bandwidth_share']:.0f} %")
        table.add_row(row["precision"], str(row["rows"]), *figures, f"{row['ratio_to_one']:.2f}", bar)
    console.print(table)


def show_comparison(comparison: dict[str, Any], names: tuple[str, str]) -> None:
    """Two results side by side, sums only, and what else differs between them."""
    console = screen()
    table = _table("speed-up over plain decoding (95 % interval)")
    for name in ("workload", "split", "method", *names, "ratio", ""):
        table.add_column(name, justify="left" if name in ("workload", "split", "method", "") else "right")
    for row in comparison["rows"]:
        if row["category"] != ALL:
            continue
        first, second = ("" if each is None else speed(each) for each in (row["first"], row["second"]))
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        remark = {True: "apart", False: "overlap", None: ""}[row["apart"]]
        table.add_row(row["workload"], row["split"], row["method"], first, second, ratio, remark)
    console.print(table)
    for name, (first, second) in comparison["differences"].items():
        console.print(f"{name}: {first!r} against {second!r}", markup=False)


def screen() -> Console:
    """Standard output; wide where it is a file, so that nothing is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
