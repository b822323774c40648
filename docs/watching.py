"""The generated part of the documentation about monitors, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from figures import RESULTS, ROOT, load, table
from plots import intervals

_SHOWN = ("auroc", "auroc within strata", "average precision", "caught at 5% false")
_FLAGGED = ("flagged of right", "flagged of wrong")


def monitors() -> str:
    """How well each tells wrong answers, and what acting on it did."""
    found = load("monitors")
    wrong = ", ".join(f"{name} {some}/{of}" for name, (some, of) in found["wrong"].items())
    head = ["", "AUROC", "95% interval", "within strata", "average precision", "caught at 5% false", *_FLAGGED]
    rows = [_row(name, each) for name, each in found["monitors"].items()]
    parts = [
        "`decodery bench --workload monitors --methods answers --rounds 3 --out DIR`",
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


def testbeds() -> str:
    """What `decodery bench --workload monitors` found on the other testbeds."""
    found = load("watching")
    settings = found["settings"]
    asked = f"--methods {','.join(found['done'])} --prompts {settings['prompts']} --rounds {settings['rounds']}"
    head = ["testbed", "monitor", "AUROC", "95% interval", "within strata", "caught at 5% false", "calibration error"]
    head += ["base rate", *_FLAGGED]
    rows = [
        [each["testbed"], each["monitor"], _figure(each["auroc"]), _between(each)]
        + [_figure(each.get(name)) for name in ("within", "caught", "error", "base", "false", "flagged")]
        for each in found["rows"]
    ]
    parts = [f"`decodery bench --workload monitors {asked} --out DIR`", table(head, rows)]
    parts += [f"![How well monitors tell what is to be flagged](monitors-{bed}.svg)" for bed in beds(found)]
    for bed in dict.fromkeys(act["testbed"] for act in found["acts"]):
        mine = [act for act in found["acts"] if act["testbed"] == bed]
        acts = [{name: value for name, value in act.items() if name != "testbed"} for act in mine]
        parts.append(table(list(acts[0]), [[_figure(value) for value in act.values()] for act in acts]))
    return "\n\n".join([*parts, *(f"- {note}" for note in found["notes"])])


def _between(row: dict[str, Any]) -> str:
    return "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}"


def beds(found: dict[str, Any]) -> list[str]:
    """The testbeds of which something is told, in the order of the result."""
    return list(dict.fromkeys(row["testbed"] for row in _told(found)))


def _told(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["auroc"] is not None and row["low"] is not None]


def reach(bed: str) -> str:
    """A plot of one testbed: the mean AUROC of every monitor, and how far seeds and the first one's interval reach."""
    return intervals(f"AUROC, {bed}", [_reach(row) for row in _told(load("watching")) if row["testbed"] == bed])


def _reach(row: dict[str, Any]) -> tuple[str, float, float, float]:
    seeds = [value for value in row["by_seed"] if value is not None]
    return row["monitor"], min(row["low"], *seeds), row["auroc"], max(row["high"], *seeds)


def overhead() -> str:
    """Tokens per second with 0, 1 and 5 monitors, where that was measured."""
    command = "`python benchmarks/monitor_overhead.py --out benchmarks/results/monitor-overhead.json`"
    if not (RESULTS / "monitor-overhead.json").exists():
        return f"{command}\n\nTokens per second with 0, 1 and 5 monitors wait for a machine that does nothing else."
    found = load("monitor-overhead")
    rows = [
        [row["drafter"] or "none", *(f"{row[name]:g}" for name in ("monitors", "tokens per second", "ratio"))]
        for row in found["rows"]
    ]
    said = (
        f"{found['prompts']} questions to {found['model']}, medians over {found['rounds']} rounds; ratios within each:"
    )
    return f"{command}\n\n{said}\n\n" + table(["drafter", "monitors", "tokens per second", "ratio to none"], rows)


def _figure(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


SECTIONS: dict[str, Callable[[], str]] = {"monitors": monitors, "testbeds": testbeds, "overhead": overhead}
PLOTS: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "results" / f"monitors-{bed}.svg": partial(reach, bed) for bed in beds(load("watching"))
}
