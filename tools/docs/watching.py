"""The generated part of the documentation about monitors, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from figures import RESULTS, ROOT, load, load_all, table
from plots import intervals

from decodery_benchmarks.monitors.settings import TESTBEDS

_SHOWN = {
    "within strata": "within",
    "average precision": "precision",
    "caught at 5% false": "caught",
    "calibration error": "error",
    "base rate": "base",
    "flagged of right": "false",
    "flagged of wrong": "flagged",
}
_ANSWERS = "answers"


def monitors() -> str:
    """How well each tells wrong answers, and what acting on it did."""
    return _bed(_found()[_ANSWERS], _ANSWERS)


def testbeds() -> str:
    """What `python benchmarks/bench.py monitors` found on the other testbeds, and further figures of answers."""
    parts = []
    for found in _found().values():
        for bed in _beds(found):
            if bed != _ANSWERS:
                parts += [f"### {bed}", _bed(found, bed)]
    return "\n\n".join(parts)


def _found() -> dict[str, Any]:
    """What was recorded, by testbed."""
    known = load_all("watching-*")
    return {name: known[f"watching-{name}"] for name in TESTBEDS if f"watching-{name}" in known}


def _beds(found: dict[str, Any]) -> list[str]:
    """What one run tells of: its testbed, and further questions to it."""
    return list(dict.fromkeys(each["testbed"] for each in (*found["rows"], *found["acts"])))


def _bed(found: dict[str, Any], bed: str) -> str:
    """The tables of one testbed, its plot and its notes."""
    rows, acts = ([each for each in found[part] if each["testbed"] == bed] for part in ("rows", "acts"))
    settings = found["settings"]
    asked = f"--methods {settings['methods'][0]} --prompts {settings['prompts']} --rounds {settings['rounds']}"
    parts = [f"`python benchmarks/bench.py monitors {asked} --out DIR`"]
    if rows:
        parts += [_detections(rows), f"![{bed}: how well monitors tell](monitors-{bed}.svg)"]
    parts += [_acts(acts)] if acts else []
    notes = [f"- {note.partition(': ')[2]}" for note in found["notes"] if note.partition(":")[0] == bed]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _detections(rows: list[dict[str, Any]]) -> str:
    shown = {name: key for name, key in _SHOWN.items() if any(row.get(key) is not None for row in rows)}
    return table(
        ["monitor", "AUROC, mean", "of seeds", "95% interval, first seed", *shown],
        [
            [
                *(row["monitor"], _figure(row["auroc"]), _between(*_seeds(row)), _between(row["low"], row["high"])),
                *(_figure(row.get(key)) for key in shown.values()),
            ]
            for row in rows
        ],
    )


def _acts(acts: list[dict[str, Any]]) -> str:
    """A table of what was done, whose columns are those of all rows."""
    head = [name for name in dict.fromkeys(name for act in acts for name in act) if name != "testbed"]
    return table(head, [[_figure(act.get(name)) for name in head] for act in acts])


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _seeds(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """The least and the greatest figure of a monitor's seeds, None where there is one seed alone."""
    found = [value for value in row["by_seed"] if value is not None]
    return (min(found), max(found)) if len(found) > 1 else (None, None)


def reach(rows: list[dict[str, Any]]) -> str:
    """A plot of one testbed: the mean AUROC of every monitor, and how far seeds and the first one's interval reach."""
    return intervals(f"AUROC, {rows[0]['testbed']}", [_reach(row) for row in rows])


def plots() -> dict[Path, Callable[[], str]]:
    """The plot of every testbed on which something is told."""
    found: dict[Path, Callable[[], str]] = {}
    for name, each in _found().items():
        told = [row for row in each["rows"] if row["auroc"] is not None and row["low"] is not None]
        if told:
            found[ROOT / "docs" / "results" / f"monitors-{name}.svg"] = partial(reach, told)
    return found


def _reach(row: dict[str, Any]) -> tuple[str, float, float, float]:
    seeds = [value for value in row["by_seed"] if value is not None]
    return row["monitor"], min(row["low"], *seeds), row["auroc"], max(row["high"], *seeds)


def overhead() -> str:
    """Tokens per second under monitors, where that was measured."""
    command = "`python benchmarks/monitor_overhead.py --out benchmarks/results/monitor-overhead.json`"
    if not (RESULTS / "monitor-overhead.json").exists():
        return f"{command}\n\nTokens per second under monitors wait for a machine that does nothing else."
    found = load("monitor-overhead")
    # Older results were taken with one memory for all rounds.
    seen = "" if found.get("memory") == "fresh" else ", seen before"
    rows = [
        [
            row["drafter"] + seen if row["drafter"] else "none",
            str(row["monitors"]),
            *(f"{row[name]:g}" for name in ("tokens per second", "ratio")),
        ]
        for row in found["rows"]
    ]
    said = (
        f"{found['prompts']} questions to {found['model']}, medians over {found['rounds']} rounds; ratios within each:"
    )
    return f"{command}\n\n{said}\n\n" + table(["drafter", "monitors", "tokens per second", "ratio to none"], rows)


def _figure(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def guarded() -> str:
    """How often a server's guard stops right and wrong answers, and what clients achieve against it."""
    command = "python benchmarks/guarded_server.py --out benchmarks/results/guarded-server.json"
    if not (RESULTS / "guarded-server.json").exists():
        return f"No run was recorded yet: `{command}`."
    found = load("guarded-server")
    rows = []
    for name, each in found["rows"].items():
        if "rate" in each:
            between = " to ".join(f"{edge:.3f}" for edge in each["interval"])
            rows.append([name, str(each["answers"]), str(each["stopped"]), f"{each['rate']:.3f}", between])
        else:
            rows += [
                [f"a client asks for: {how}", str(each["answers"]), str(each["answers"] - whole), "", ""]
                for how, whole in each["answered whole"].items()
            ]
    said = (
        f"`{found['command']}`: a probe of {found['site']} in {found['model']}, trained and calibrated by one command "
        f"at a rate of {found['rate']:g} on {found['right answers of calibration']} right answers, guards a server; "
        f"questions of other groups are asked over HTTP. AUROC of its test part: {found['held out in training']:.3f}. "
        "The rate is promised on average over what a threshold may be set on: one that was set on so few answers may "
        "flag far more, or fewer."
    )
    return f"{said}\n\n" + table(["", "answers", "stopped", "rate", "95 %"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "monitors": monitors,
    "testbeds": testbeds,
    "overhead": overhead,
    "guarded": guarded,
}
PLOTS = plots()
