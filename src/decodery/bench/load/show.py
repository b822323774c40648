"""Load in tables: for a terminal, for Markdown."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

HEAD = (
    "server",
    "load",
    "good",
    "errors",
    "requests/s",
    "goodput",
    "tokens/s",
    "first token, s",
    "gap, ms",
    "per token, ms",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row's figures under `HEAD`; times are the 50th, 90th and 99th percentile."""
    unit = {"concurrency": "at once", "rate": "/s", "speed": "times as recorded"}[row["mode"]]
    return [
        row["server"],
        f"{row['load']:g} {unit}".replace(" /", "/"),
        f"{100 * row['good_share']:.0f} %",
        str(row["errors"]),
        f"{row['requests_per_second']:.2f}",
        f"{row['goodput']:.2f}",
        f"{row['tokens_per_second']:.0f}",
        _times(row["first_token"], 1, 2),
        _times(row["gap"], 1000, 0),
        _times(row["per_token"], 1000, 0),
    ]


def _times(found: dict[str, float] | None, unit: float, digits: int) -> str:
    return "" if found is None else " / ".join(f"{unit * value:.{digits}f}" for value in found.values())


def title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    what, requests = (
        settings["trace"] or settings["workload"],
        max((row["requests"] for row in result["rows"]), default=0),
    )
    return (
        f"{result['model']['name']}, {what}, {requests} requests per stage; good: the first token within "
        f"{settings['first_token_limit']:g} s and {settings['gap_limit']:g} s per token"
    )


def show(result: dict[str, Any], console: Console) -> None:
    """All stages, and what was left out."""
    table = Table(title=title(result), title_justify="left", title_style="bold", header_style="dim", box=None)
    for name in HEAD:
        table.add_column(name, justify="left" if name == "server" else "right", overflow="fold")
    for row in result["rows"]:
        table.add_row(*cells(row), style="red" if row["errors"] else None)
    console.print(table)
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)
