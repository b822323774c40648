"""The generated part of the documentation about monitors, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, table

_SHOWN = ("auroc", "auroc within strata", "average precision", "caught at 5% false")
_FLAGGED = ("flagged of right", "flagged of wrong")


def monitors() -> str:
    """How well each tells wrong answers, and what acting on it did."""
    found = load("monitors")
    wrong = ", ".join(f"{name} {some}/{of}" for name, (some, of) in found["wrong"].items())
    head = ["", "AUROC", "95% interval", "within strata", "average precision", "caught at 5% false", *_FLAGGED]
    rows = [_row(name, each) for name, each in found["monitors"].items()]
    parts = [
        "`python benchmarks/monitors.py --work DIR --out benchmarks/results/monitors.json`",
        f"{found['questions']} questions to {found['model']}, answered wrongly: {wrong}. Means over {found['seeds']} "
        f"seeds of split and training, of the test part alone; thresholds at a rate of {found['rate']}. The interval "
        "is the first seed's, over groups.",
        table(head, rows),
    ]
    if "actions" in found:
        head = ["", *next(iter(found["actions"].values()))]
        rows = [[name, *(f"{value:g}" for value in each.values())] for name, each in found["actions"].items()]
        parts += ["What acting on it does to the answers of the first seed's test part:", table(head, rows)]
    return "\n\n".join(parts)


def _row(name: str, each: dict[str, Any]) -> list[str]:
    auroc, *others = (f"{each[shown]:.3f}" for shown in _SHOWN)
    low, high = each["interval"]
    flagged = [f"{each[shown]:.2f}" if shown in each else "" for shown in _FLAGGED]
    return [name, auroc, f"{low:.2f} to {high:.2f}", *others, *flagged]


SECTIONS: dict[str, Callable[[], str]] = {"monitors": monitors}
