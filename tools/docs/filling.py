"""The generated parts of the documentation about diffusion, from what the benchmark recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from figures import load, table, table_of

from decodery_benchmarks.diffusion.tasks import SEVERAL

_BARS = dict.fromkeys(("copy", "reverse", "insert-index", "remove-index", "replace-index"), 0.98)
"""What static decoding has to get right before a model may judge methods; `LEAST` of all other tasks."""
LEAST = 0.95


_NO_TASK = ("part", "seed", "method", "right", "passes", "tokens per pass", "distinct")
"""Names of a row of trained parts that are not those of tasks."""


def ways(name: str) -> str:
    """What a pass may write without loss, task by task."""
    from decodery_benchmarks.diffusion.figures import adaptivity_gap, fastest, totals

    found = load(name)
    settings, rows = found["settings"], found["rows"]
    runs = {
        f"`{row['method']}`": {name: row[name] for name in row if name != "method"} | _shares(rows, row["method"])
        for row in totals(rows)
    }
    speeds = fastest(rows, list(dict.fromkeys(row["method"] for row in rows)))
    shown = ", ".join(f"{task} {speed:.1f}" for task, speed in speeds.items())
    made = f"Model: `{found['made']}`. Figures: `{found['command']}`, {settings['prompts']} prompts of each task."
    return (
        f"{made}\n\n{table_of(runs)}\n\nThe most tokens a pass with 95 % of static's right answers: "
        f"{shown}. The best threshold of each task is {adaptivity_gap(rows):.2f} times as fast as the best for all."
    )


def _shares(rows: list[dict[str, Any]], method: str) -> dict[str, str]:
    """Shares of right answers with their 95 % intervals, of tasks with one answer and of tasks with several."""
    found = {}
    for name, several in (("one answer", False), ("several", True)):
        own = [row for row in rows if row["method"] == method and (row["task"] in SEVERAL) == several]
        if own:
            found[name] = _share(sum(row["right"] for row in own), sum(row["prompts"] for row in own))
    return found


def _share(right: int, count: int) -> str:
    from decodery.bench.metrics import wilson

    low, high = wilson(right, count)
    return f"{right / count:.3f} ({low:.3f} to {high:.3f})"


def bar() -> str:
    """What static decoding gets right, of models that are to judge methods."""
    lines, said = [], []
    for name in ("parallelbench-bar", "parallelbench-bar-m", "parallelbench-puzzles", "parallelbench-sudoku"):
        found = load(name)
        said.append(f"{len(said) + 1}: `{found['made']}`, then `{found['command']}`")
        for row in (row for row in found["rows"] if row["method"] == "static"):
            least = _BARS.get(row["task"], LEAST)
            met = "yes" if row["right"] >= least * row["prompts"] else "no"
            share = _share(row["right"], row["prompts"])
            lines.append([str(len(said)), row["task"], str(row["prompts"]), share, f"{least}", met])
    head = ["model", "task", "held-out prompts", "right", "bar", "passed"]
    return "\n\n".join(said) + "\n\n" + table(head, lines)


_FREE = "free"
"""The column of ways that have no fixed number of passes."""


def grid() -> str:
    """Order, passes and blocks, of a model and of an oracle."""
    found = load("canvas-grid")
    rows, facts = found["rows"], found["settings"]
    parts = [f"`{found['command']}`: {facts['prompts']} prompts of each task, canvases of {facts['places']} places."]
    for title, several in (("with one answer", False), ("with several answers", True)):
        cells: dict[str, dict[str, str]] = {}
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method and (row["task"] in SEVERAL) == several]
            shares = [share_right([row for row in own if row["of"] == of]) for of in ("model", "oracle")]
            place, order = _cell_of(method)
            cells.setdefault(place, {})[order] = f"{shares[0]:.2f} ({shares[1]:.2f})"
        orders = ["random", "probability", "margin", "entropy"]
        fixed = {place: each for place, each in cells.items() if _FREE not in each}
        lines = [[place, *(each.get(order, "") for order in orders)] for place, each in fixed.items()]
        parts.append(f"Tasks {title}, the model and in brackets the oracle:\n\n" + table(["", *orders], lines))
        free = [f"{place} {each[_FREE]}" for place, each in cells.items() if _FREE in each]
        parts.append("In no fixed number of passes: " + ", ".join(free) + ".")
    hard = {of: _means(rows, of) for of in ("model", "oracle")}
    tasks = list(hard["model"])
    ranks = [_ranks([each[task] for task in tasks]) for each in hard.values()]
    shown = ", ".join(f"{task} {hard['model'][task]:.2f} ({hard['oracle'][task]:.2f})" for task in tasks)
    rank = np.corrcoef(ranks)[0, 1]
    parts.append(f"Mean over the whole grid, by task: {shown}. Rank correlation of model and oracle {rank:.2f}.")
    return "\n\n".join(parts)


def _means(rows: list[dict[str, Any]], of: str) -> dict[str, float]:
    own = [row for row in rows if row["of"] == of]
    tasks = dict.fromkeys(row["task"] for row in own)
    return {task: share_right([row for row in own if row["task"] == task]) for task in tasks}


def _ranks(values: list[float]) -> np.ndarray:
    """Of each value, those that are alike sharing theirs."""
    order = np.asarray(values)
    return (order[:, None] > order).sum(axis=1) + (order[:, None] == order).sum(axis=1) / 2


def share_right(rows: list[dict[str, Any]]) -> float:
    return sum(row["right"] for row in rows) / sum(row["prompts"] for row in rows)


def _cell_of(method: str) -> tuple[str, str]:
    """Where a way stands in the grid: its row and its column."""
    name, _, given = method.partition(":")
    settings = dict(each.split("=") for each in given.split(","))
    if "steps" not in settings:
        return f"`{method}`", _FREE
    order = "random" if name == "random" else settings.get("measure", "probability")
    return f"blocks of {settings['block']}, {settings['steps']} passes", order


def held(name: str) -> str:
    """What a constraint changes, and what it takes."""
    found = load(name)
    return (
        f"Figures: `{found['command']}`, {found['settings']['prompts']} held-out prompts.\n\n{table_of(found['rows'])}"
    )


def handoff() -> str:
    """What a canvas is worth by how many of its passes are the better model's, and which."""
    found = load("canvas-handoff")
    runs, passes = found["rows"], found["passes"]
    counts = sorted({int(name.split()[-1]) for name in runs} - {0, passes})

    def told(name: str) -> str:
        return f"{runs[name]['right']:.2f} ± {runs[name]['standard error']:.2f}"

    rows = [[f"the {where}" if where != "by chance" else where, *(told(f"{where} {count}") for count in counts)]
            for where in ("first", "last", "by chance")]  # fmt: skip
    return (
        f"`{found['command']}`, {found['examples']} examples of {', '.join(found['tasks'])}, {passes} passes each.\n\n"
        + table(["the better model's passes", *map(str, counts)], rows)
        + f"\n\nNone of them: {told('first 0')}; all of them: {told(f'first {passes}')}."
    )


def canvas_training() -> str:
    """What learned parts bring, beside controls: means over seeds, and the range of what is right."""
    found = load("canvas-training")
    facts, lines = found["settings"], []
    for part, method in dict.fromkeys((row["part"], row["method"]) for row in found["rows"]):
        own = [row for row in found["rows"] if (row["part"], row["method"]) == (part, method)]

        def mean(name: str, own: list[dict[str, Any]] = own) -> float:
            return sum(row[name] for row in own) / len(own)

        right = [row["right"] for row in own]
        tasks = [name for name in own[0] if name not in _NO_TASK]
        lines.append(
            [part, f"`{method}`", f"{mean('right'):.3f} ({min(right):.3f} to {max(right):.3f})"]
            + [f"{mean(name):.2f}" for name in ("passes", "tokens per pass", *tasks, "distinct")]
        )
    head = ["trained", "policy", "right", "passes", "tokens per pass", *tasks, "distinct"]
    return (
        f"`{found['command']}`: {facts['steps']:,} steps each, {facts['seeds']} seeds, {facts['prompts']} prompts of "
        f"each task.\n\n" + table(head, lines)
    )


def adaptation() -> str:
    """What an adapted model gets right."""
    found = load("adaptation")
    facts = found["settings"]
    return (
        f"`{found['command']}`: {facts['prompts']} held-out lists; the training took {facts['minutes']:g} minutes of "
        f"one core.\n\n" + table_of(found["rows"])
    )


def canvas_experts(name: str) -> str:
    """What canvases that share experts get right, and how many experts their passes read."""
    from decodery.bench.metrics import wilson

    found = load(name)
    layers, lines = found["model"]["layers"], []
    for method in dict.fromkeys(row["method"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["method"] == method]
        right, count = sum(row["right"] for row in own), sum(row["prompts"] for row in own)
        low, high = wilson(right, count)
        passes = sum(row["passes"] * row["prompts"] for row in own)
        read = sum(row["experts"] * row["passes"] * row["prompts"] for row in own) / passes / layers
        lines.append(
            [f"`{method}`", f"{right / count:.3f}", f"{low:.3f} to {high:.3f}", f"{read:.1f}", f"{passes / count:.2f}"]
        )
    head = ["", "right", "95% interval", "experts of a layer that a pass reads", "passes"]
    return f"Model: `{found['made']}`. Figures: `{found['command']}`.\n\n" + table(head, lines)


def canvas_cost() -> str:
    """Times of a canvas by way of filling, and in company."""
    found = load("canvas-cost")
    facts = found["settings"]
    rows = [
        [
            f"`{name}`" if ":" in name else name,
            f"{1e3 * each['seconds']:.0f}",
            f"{each['ratio']:.2f} ({each['least']:.2f} to {each['most']:.2f})",
            f"{each['beside']:.1%}",
            *(f"{each[key]:.0f}" for key in ("passes", "rows", "pairs")),
        ]
        for name, each in found["rows"].items()
    ]
    return (
        f"`{found['command']}` on {found['machine']['processor']}, {found['machine']['threads']} threads: canvases of "
        f"{facts['places']} positions after {facts['prompt']} tokens, {facts['rounds']} rounds in turns.\n\n"
        + table(["", "ms a canvas", "of the first of its kind", "beside the passes", "passes", "rows", "pairs"], rows)
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "parallelbench-bar": bar,
    **{name: partial(ways, name) for name in ("parallelbench", "parallelbench-m", "parallelbench-sudoku")},
    "canvas-grid": grid,
    "canvas-handoff": handoff,
    **{name: partial(held, name) for name in ("lave", "lave-s", "lave-s-weak")},
    "canvas-cost": canvas_cost,
    **{name: partial(canvas_experts, name) for name in ("canvas-experts", "canvas-experts-s")},
    "canvas-training": canvas_training,
    "adaptation": adaptation,
}  # fmt: skip
