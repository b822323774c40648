"""The generated part of the documentation about trained kinds: what each came to at its smallest size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from figures import load, recorded, table

from decodery.cli.train import KV
from decodery.cli.train import SECTIONS as COMMANDS
from decodery.training.held_out import CONTROL, FALLING

_COMMAND = "python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json"
_FIGURES = ("auroc", "accuracy", "unexplained variance", "more than without")
"""Figures whose interval is called no more than "interval"."""


def trained_kinds() -> str:
    """A row for each kind of `decodery train`: held-out figure, interval, baselines, control and hours."""
    if not recorded("trained-kinds"):
        return f"No run was recorded yet: `{_COMMAND}`."
    found = load("trained-kinds")
    rows = [_row(kind, found["rows"].get(kind)) for kind in _kinds()]
    head = ["kind", "figure", "held out", "95 % interval", "baselines", "control", "beyond them", "processor hours"]
    return f"`{found['command']}`, with `{found['settings']['model']}`.\n\n" + table(head, rows)


def _kinds() -> list[str]:
    """All kinds, in the order of the help."""
    plain = [name for names in COMMANDS.values() for name in names if name != "kv"]
    return [*plain, *(f"kv {name}" for names in KV.values() for name in names)]


def _row(kind: str, row: Mapping[str, Any] | None) -> list[str]:
    if row is None or "printed" not in row:
        why = "no time was left" if row is None else row["not run"]
        return [f"`{kind}`", f"not run: {why}", *[""] * 6]
    printed, hours = row["printed"], f"{row['processor hours']:.3f}"
    name, interval = _figure(printed)
    if not name:
        plain = ", ".join(f"{each} {_said(value)}" for each, value in printed.items() if isinstance(value, int | float))
        return [f"`{kind}`", "chooses or counts; nothing is held out", plain, *[""] * 4, hours]
    beside = {
        each: value if isinstance(value, dict) else {name: value}
        for each, value in printed.get("baselines", {}).items()
    }
    baselines = ", ".join(f"{each} {_said(value.get(name))}{_gained(value)}" for each, value in beside.items())
    control = printed.get(CONTROL)
    edges = control.get(f"interval of {name}", control.get("interval")) if control else None
    shown = f"{_said(control[name])} ({_between(edges)}){_gained(control)}" if control else ""
    beyond = _beyond(name, printed, [*beside.values(), *([control] if control else [])])
    return [f"`{kind}`", name, _said(printed.get(name)), _between(interval), baselines, shown, beyond, hours]


def _gained(other: Mapping[str, Any]) -> str:
    """The gain over another figure with its interval; "" where none was measured."""
    return f", gain {_said(other['gain'])} ({_between(other['interval of gain'])})" if "gain" in other else ""


def _beyond(name: str, printed: Mapping[str, Any], others: list[Mapping[str, Any]]) -> str:
    """Whether the gain over all baselines and the control is above 0 with its whole interval.

    Where no gain was measured, whether the whole interval is better than they are; "" without these.
    """
    if "gain" in printed:
        if printed["gain"].startswith("fewer"):
            return "too few items"
        return "yes" if all(each["interval of gain"][0] > 0 for each in others if "gain" in each) else "no"
    known = [each[name] for each in others if each.get(name) is not None]
    _, interval = _figure(printed)
    if interval is None or not known:
        return ""
    better = interval[1] < min(known) if name in FALLING else interval[0] > max(known)
    return "yes" if better else "no"


def _figure(printed: Mapping[str, Any]) -> tuple[str, list[float] | None]:
    """The figure with an interval, and the interval; "" for none."""
    for each, value in printed.items():
        if each.startswith("interval of "):
            return each.removeprefix("interval of "), value
    name = next((each for each in _FIGURES if each in printed), "")
    return name, printed.get("interval")


def _between(interval: list[float] | None) -> str:
    return "" if interval is None else " to ".join(map(_said, interval))


def _said(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def tuning() -> str:
    """A row for each tuning of a small model, with the gain over its baselines and its control."""
    if not recorded("tuning"):
        return "No run was recorded yet: `python benchmarks/tuning.py --out benchmarks/results/tuning.json`."
    found, rows = load("tuning"), []
    for name, row in found["rows"].items():
        figure = row["figure"]
        others = {**row["baselines"], CONTROL: row[CONTROL]}
        beside = ", ".join(f"{each} {_said(value[figure])}{_gained(value)}" for each, value in others.items())
        shown = [row["tested on"], figure, _said(row[figure]), beside, row["gain"]]
        rows.append([name, *shown, f"{row['processor minutes']:.1f}"])
    head = ["tuning, model", "tested on", "figure", "tuned", "beside it", "so it is", "processor minutes"]
    return f"`{found['command']}`.\n\n" + table(head, rows)


SECTIONS: dict[str, Callable[[], str]] = {"trained-kinds": trained_kinds, "tuning": tuning}
"""Of the pages, by name."""
