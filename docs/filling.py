"""The generated parts of the documentation about diffusion, from what the benchmark recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, runs_of, table, table_of


def parallelbench() -> str:
    """What a pass may write without loss, task by task."""
    from decodery.bench.canvases.figures import adaptivity_gap, fastest, totals

    found = load("parallelbench")
    settings, rows = found["settings"], found["rows"]
    runs = {f"`{row['method']}`": {name: row[name] for name in row if name != "method"} for row in totals(rows)}
    speeds = fastest(rows, list(dict.fromkeys(row["method"] for row in rows)))
    shown = ", ".join(f"{task} {speed:.1f}" for task, speed in speeds.items())
    made = f"Model: `{found['made']}`. Figures: `{found['command']}`, {settings['prompts']} prompts of each task."
    return (
        f"{made}\n\n{table_of(runs)}\n\nThe most tokens a pass with 95 % of static's right answers: "
        f"{shown}. The best threshold of each task is {adaptivity_gap(rows):.2f} times as fast as the best for all."
    )


def lave() -> str:
    """What a constraint changes, and what it takes."""
    found = load("lave")
    return (
        f"Figures: `{found['command']}`, {found['facts']['prompts']} prompts held out.\n\n{table_of(found['results'])}"
    )


def handoff() -> str:
    """What a canvas is worth by how many of its passes are the better model's, and which."""
    found = load("canvas-handoff")
    runs, passes = runs_of(found), found["passes"]
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
    """What training on its own decoding brings, beside a control."""
    found = load("canvas-training")
    facts = found["facts"]
    return (
        f"`{found['command']}`: {facts['steps']:,} steps each, one seed, {facts['prompts']} prompts of each task.\n\n"
        + table_of(found["results"])
    )


def adaptation() -> str:
    """What an adapted model gets right."""
    found = load("adaptation")
    facts = found["facts"]
    return (
        f"`{found['command']}`: {facts['prompts']} lists held out; the training took {facts['minutes']:g} minutes of "
        f"one core.\n\n" + table_of(found["results"])
    )


def canvas_experts() -> str:
    """What canvases that share experts get right, and how many experts their passes read."""
    from decodery.bench.canvases.job import wilson

    found = load("canvas-experts")
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
    facts = found["facts"]
    rows = [
        [
            f"`{name}`" if ":" in name else name,
            f"{1e3 * each['seconds']:.0f}",
            f"{each['ratio']:.2f} ({each['least']:.2f} to {each['most']:.2f})",
            f"{each['beside']:.1%}",
            *(f"{each[key]:.0f}" for key in ("passes", "rows", "pairs")),
        ]
        for name, each in found["results"].items()
    ]
    return (
        f"`{found['command']}` on {facts['machine']['processor']}, {facts['machine']['threads']} threads: canvases of "
        f"{facts['places']} places behind {facts['prompt']} tokens, {facts['rounds']} rounds in turns.\n\n"
        + table(["", "ms a canvas", "of the first of its kind", "beside the passes", "passes", "rows", "pairs"], rows)
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "parallelbench": parallelbench, "lave": lave, "canvas-handoff": handoff,
    "canvas-cost": canvas_cost, "canvas-experts": canvas_experts, "canvas-training": canvas_training,
    "adaptation": adaptation,
}  # fmt: skip
