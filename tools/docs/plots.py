"""Plots of recorded figures: small SVG files beside the pages of results, made anew with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from figures import ROOT, load, recorded
from filling import SEVERAL

from decodery_benchmarks import scaling

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#882255", "#444444"),
    *("#E41A1C", "#332288", "#999933", "#66A61E", "#8C564B"),
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP, LEGEND = 230, 210, 46, 34, 44, 36, 150


@dataclass(frozen=True)
class Line:
    """points: (x, y) in order of x. bound: no method, but what none can exceed; drawn dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    bound: bool = False


@dataclass(frozen=True)
class Upward:
    """The scale of y: from 0 to `most`, and what it shows."""

    shows: str = "share right"
    most: float = 1.0


def plot(title: str, axis: str, panels: dict[str, list[Line]], upward: Upward = Upward()) -> str:
    """Panels side by side with one scale: x by powers of two, y as `upward` says."""
    found = [x for lines in panels.values() for line in lines for x, _ in line.points]
    low, high = math.floor(math.log2(min(found))), math.ceil(math.log2(max(found)))
    names = list(dict.fromkeys(line.name for lines in panels.values() for line in lines if not line.bound))
    bounds = list(dict.fromkeys(line.name for lines in panels.values() for line in lines if line.bound))
    colours = dict(zip(names, COLOURS, strict=False)) | dict.fromkeys(bounds, "#999999")
    width = LEFT + len(panels) * (WIDTH + GAP) + LEGEND
    height = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#333333">',
        f'<title>{title}</title><rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (name, lines) in enumerate(panels.items()):
        parts += _panel(name, lines, LEFT + number * (WIDTH + GAP), (low, high), axis, colours, upward, number == 0)
    for number, name in enumerate([*names, *bounds]):
        y, x = TOP + 8 + 18 * number, width - LEGEND + 4
        dash = ' stroke-dasharray="4 3"' if name in bounds else ""
        parts.append(f'<path d="M{x} {y}h18" stroke="{colours[name]}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 24}" y="{y + 4}">{name}</text>')
    return "".join(parts) + "</svg>\n"


def _panel(
    name: str,
    lines: Sequence[Line],
    left: int,
    span: tuple[int, int],
    axis: str,
    colours: dict[str, str],
    upward: Upward,
    labelled: bool,
) -> list[str]:
    low, high = span

    def across(x: float) -> float:
        return left + WIDTH * (math.log2(x) - low) / max(high - low, 1)

    def up(y: float) -> float:
        return TOP + HEIGHT * (1 - y / upward.most)

    parts = [f'<text x="{left}" y="{TOP - 12}" font-size="12" font-weight="600">{name}</text>']
    for tick in (upward.most * quarter / 4 for quarter in range(5)):
        parts.append(f'<path d="M{left} {up(tick):.1f}h{WIDTH}" stroke="#e4e4e4"/>')
        if labelled:
            parts.append(f'<text x="{left - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{across(2.0**power):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{2**power}</text>'
        for power in range(low, high + 1, 1 + (high - low) // 7)
    ]
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{axis}</text>')
    if labelled:
        y = TOP + HEIGHT / 2
        parts.append(f'<text x="12" y="{y}" text-anchor="middle" transform="rotate(-90 12 {y})">{upward.shows}</text>')
    for line in lines:
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="4 3"' if line.bound else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{colours[line.name]}" stroke-width="1.8"{dash}/>')
        if not line.bound:
            parts += [
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.6" fill="{colours[line.name]}"/>'
                for x, y in line.points
            ]
    return parts


STEPS = (
    *("best-of-n", "step-beam", "dvts", "particle-filter", "particle-gibbs", "mcts", "a-star", "adaptive-sampling"),
)
"""Of `value-guided` the points are those of `dvts`."""
PRESETS = "noisy", "hackable", "constant"
SEEING = "clean", "noisy", "hackable"
"""Of rewards that do not differ on these puzzles."""
SAMPLES = "best-of-n", "weighted-vote", "self-consistency"


def searches(result: str, names: Sequence[str], cost: str, axis: str, presets: Sequence[str] = PRESETS) -> str:
    """Searches on puzzles by what they spend, a panel for each reward."""
    rows = load(result)["rows"]
    panels = {}
    for reward in dict.fromkeys(row["reward"] for row in rows if _shown(row["reward"], presets)):
        lines = []
        for name in ("pass@n", *names):
            of = [row for row in rows if _named(row, name) and row["reward"] in (reward, "") and row[cost]]
            if points := sorted((row[cost], row["accuracy"]) for row in of):
                lines.append(Line(name, tuple(points), bound=name == "pass@n"))
        panels[f"reward: {_shown(reward, presets)}"] = lines
    return plot(f"Share of puzzles solved by {axis}", axis, panels)


def _shown(reward: str, presets: Sequence[str]) -> str:
    """A reward's name above its panel, "" for those that have none: they look like another one."""
    return "a head trained on rollouts" if "rollouts" in reward else reward if reward in presets else ""


def _named(row: dict[str, Any], name: str) -> bool:
    """Whether a row is of this search as published, and of no variant that votes."""
    found: str = row["method"]
    return found.partition("(")[0] == name and "choose=vote" not in found


def intervals(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """A line per row, (name, least, middle, largest) of 0 to 1, with a mark at the middle; dashed at one half."""
    left, across, step = max(260, 16 + 6 * max(len(name) for name, *_ in rows)), 360, 22
    width, height = left + across + 60, TOP + step * len(rows) + 30

    def x(value: float) -> str:
        return f"{left + across * value:.1f}"

    bottom = TOP + step * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#333333">',
        f'<title>{title}</title><rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="{TOP - 12}" font-size="12" font-weight="600">{title}</text>',
        f'<path d="M{x(0.5)} {TOP - 4}V{bottom}" stroke="#999999" stroke-dasharray="4 3"/>',
    ]
    for number, (name, least, middle, largest) in enumerate(rows):
        y = TOP + step * number + 10
        parts += [
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{name}</text>',
            f'<path d="M{x(least)} {y}H{x(largest)}" stroke="{COLOURS[0]}" stroke-width="2" opacity="0.55"/>',
            f'<circle cx="{x(middle)}" cy="{y}" r="4" fill="{COLOURS[0]}"/>',
            f'<text x="{left + across + 10}" y="{y + 4}">{middle:.2f}</text>',
        ]
    parts += [
        f'<text x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        for tick in (0, 0.25, 0.5, 0.75, 1)
    ]
    return "".join(parts) + "</svg>\n"


def law(axis: str, label: str) -> str:
    """What a sweep of drafts has measured, and the law fitted to it."""
    found = load(f"draft-sweep-{axis}")
    return scaling.plot(scaling.Law.fit(found["amounts"], found["values"]), label, found["values_are"]) + "\n"


def foretold() -> str:
    """What the law of two amounts foretells of every draft from all others, against what was measured."""
    found = load("draft-sweep-both")
    return scaling.plot_foretold(found["foretold"], found["values_are"]) + "\n"


WAYS = (
    "static", "threshold", "factor", "local-leap", "freedave", "freedave-plus", "cad", "ccd", "explore-exploit", "r2",
    "learn2pd", "dystruct", "random",
)  # fmt: skip


def canvases(name: str) -> str:
    """Ways of filling by tokens per pass, for tasks with one answer and with several; caches are left out."""
    rows = [row for row in load(name)["rows"] if "cache=" not in row["method"]]
    panels: dict[str, list[Line]] = {"tasks with one answer": [], "tasks with several": []}
    for (title, lines), several in zip(panels.items(), (False, True), strict=True):
        tasks = {row["task"] for row in rows if (row["task"] in SEVERAL) == several}
        for way in WAYS:
            points = []
            for method in dict.fromkeys(row["method"] for row in rows if row["method"].partition(":")[0] == way):
                of = [row for row in rows if row["method"] == method and row["task"] in tasks]
                tokens = sum(row["tokens_per_pass"] for row in of) / len(of)
                points.append((tokens, sum(row["right"] for row in of) / sum(row["prompts"] for row in of)))
            if points:
                lines.append(Line(way, tuple(sorted(points))))
        panels[title] = lines
    return plot("Share of right answers by tokens per pass", "tokens per pass", panels)


def grid() -> str:
    """Orders and rules over the whole canvas by tokens per pass, of a model, and the oracle's thresholds."""
    rows = load("canvas-grid")["rows"]
    ways = {
        "random": "random:block=10,", "probability": "static:block=10,", "margin": "static:measure=margin,block=10,",
        "entropy": "static:measure=entropy,block=10,", "threshold": "threshold:", "factor": "factor:",
    }  # fmt: skip
    panels: dict[str, list[Line]] = {}
    for title, several in (("tasks with one answer", False), ("tasks with several", True)):
        own = [row for row in rows if (row["task"] in SEVERAL) == several]
        panels[title] = [Line(name, _curve(own, "model", way)) for name, way in ways.items()]
        panels[title].append(Line("oracle, threshold", _curve(own, "oracle", ways["threshold"]), bound=True))
    return plot("Share of right answers by tokens per pass, over the grid", "tokens per pass", panels)


def _curve(rows: Sequence[dict[str, Any]], of: str, way: str) -> tuple[tuple[float, float], ...]:
    """Tokens per pass and the share of right answers, over all tasks, of each way that begins so."""
    points = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"].startswith(way)):
        own = [row for row in rows if row["method"] == method and row["of"] == of]
        count, passes = sum(row["prompts"] for row in own), sum(row["passes"] * row["prompts"] for row in own)
        tokens = sum(row["tokens_per_pass"] * row["passes"] * row["prompts"] for row in own) / passes
        points.append((tokens, sum(row["right"] for row in own) / count))
    return tuple(sorted(points))


def finishing() -> str:
    """What waiting for the shortest text finds, beside votes, by what is written."""
    rows, lines = load("search-finish")["rows"], list[Line]()
    for method in ("pass@n", "self-consistency", "first-finish"):
        points = sorted((row["tokens"], row["accuracy"]) for row in rows if row["method"] == method)
        lines.append(Line(method, tuple(points), bound=method == "pass@n"))
    return plot("Share of puzzles solved where slips are taken back", "generated tokens", {"slips taken back": lines})


def escalating() -> str:
    """What a share of steps by the larger model is worth, by who decides which."""
    figures, lines = load("search-pair").figures, list[Line]()
    for name, begin in (
        ("oracle", "arbitrage, oracle,"),
        ("router", "arbitrage, router,"),
        ("noisy scorer", "spec-reason, noisy,"),
        ("chance", "spec-reason, chance,"),
    ):
        points = []
        for each in (row for kind, row in figures.items() if kind.startswith(begin)):
            counts = each["counts"]
            own = counts.get("escalated", 0) + counts.get("rewritten", 0)
            points.append((100 * own / (own + counts["kept"]), each["share"]))
        lines.append(Line(name, tuple(sorted(points))))
    return plot("Share of puzzles solved by two models", "% of steps by the larger one", {"two models": lines})


def judges() -> str:
    """What judges make of k samples, by their temperature, beside the laws."""
    rows = load("search-judge-laws")["rows"]
    panels: dict[str, list[Line]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            of = [row for row in rows if row["case"] == case and row["temperature"] == temperature]
            told = [(row["k"], row["law"]) for row in of if row["law"] is not None]
            # A law of many samples alone is the level that is approached.
            law = told if len(told) > 1 else [(row["k"], told[0][1]) for row in of]
            name = "the best" if temperature == 0 else f"drawn at T = {temperature:g}"
            panels.setdefault(case, []).append(Line("the law", tuple(law), bound=True))
            panels[case].append(Line(name, tuple((row["k"], row["measured"]) for row in of)))
    return plot("What a judge makes of k samples", "samples", panels, Upward("loss, in those of one sample", 2.0))


def transforms() -> str:
    """How often the best of n texts wins, by how far the model has gone, for transforms of its reward."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in load("search-infalign")["rows"]:
        lines = panels.setdefault(f"the best of {row['n']} against the best of {row['n']}", {})
        lines.setdefault(row["transform"], []).append((row["kl"], row["win_rate"]))
    drawn = {
        panel: [Line(name, tuple(points), bound=name == "exact") for name, points in lines.items()]
        for panel, lines in panels.items()
    }
    return plot("How often the best of n wins", "nats from the untrained model", drawn, Upward("share won"))


RESULTS = ROOT / "docs" / "results"
PLOTS: dict[Path, Callable[[], str]] = {
    RESULTS / "search-samples.svg": partial(searches, "search-puzzles", SAMPLES, "tokens", "generated tokens"),
    RESULTS / "search-tokens.svg": partial(searches, "search-steps", STEPS, "tokens", "generated tokens"),
    RESULTS / "search-scorer-calls.svg": partial(searches, "search-steps", STEPS, "scorer_calls", "scorer calls"),
    RESULTS / "search-depth.svg": partial(searches, "search-steps", STEPS, "depth", "passes one after another"),
    RESULTS / "search-countdown.svg": partial(
        searches, "search-countdown", STEPS, "tokens", "generated tokens", SEEING
    ),
    RESULTS / "search-judges.svg": judges,
    RESULTS / "search-infalign.svg": transforms,
    **({RESULTS / "search-finish.svg": finishing} if recorded("search-finish") else {}),
    **({RESULTS / "search-pair.svg": escalating} if recorded("search-pair") else {}),
    RESULTS / "canvases.svg": partial(canvases, "parallelbench"),
    RESULTS / "canvases-m.svg": partial(canvases, "parallelbench-m"),
    RESULTS / "canvas-grid.svg": grid,
    RESULTS / "draft-sweep-data.svg": partial(law, "data", "tokens learned from"),
    RESULTS / "draft-sweep-size.svg": partial(law, "size", "weights of layer and head"),
    RESULTS / "draft-sweep-both.svg": foretold,
    **(
        {RESULTS / "draft-sweep-batch.svg": partial(law, "batch", "texts at once")}
        if recorded("draft-sweep-batch")
        else {}
    ),
}
