"""The kit's table, from its results file alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

COLUMNS = ("part", "check", "outcome", "s", "what was found")


def heading(result: dict[str, Any]) -> str:
    """One line: where, when and how long."""
    machine = result["machine"] or {}
    gpus = ", ".join(machine.get("gpus", [])) or "no GPU"
    counts = Counter(row["outcome"] for row in result["rows"])
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no check was run"
    ended = "" if result["complete"] else "; cut before its end"
    return (
        f"{result['created'][:10]}, device {result['settings']['device']}, size {result['settings']['size']}, "
        f"{machine.get('processor', 'unknown processor')}, {gpus}, PyTorch {machine.get('torch', '?')}, "
        f"{result['seconds']:.0f} s: {outcomes}{ended}"
    )


def table(result: dict[str, Any]) -> str:
    """All checks, in columns."""
    rows = [(row["part"], row["check"], row["outcome"], f"{row['seconds']:.1f}", row["says"]) for row in result["rows"]]
    widths = [max(len(row[at]) for row in (*rows, COLUMNS)) for at in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    head = "  ".join([*(cell.ljust(width) for cell, width in zip(COLUMNS, widths, strict=False)), COLUMNS[4]])
    return "\n".join(
        [head, "  ".join("-" * width for width in (*widths, len(COLUMNS[4]))), *lines, "", heading(result)]
    )
