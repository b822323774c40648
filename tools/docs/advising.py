"""The generated parts of the documentation about what `auto` has at hand: loops of agents, tables, fixed choices."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, recorded, table

_LEFT = "Not measured yet."


def agents() -> str:
    """What drafters bring to loops of tool calls, by what was seen before."""
    if not recorded("draft-agents"):
        return _LEFT
    found = load("draft-agents")
    runs = found["rows"]
    parts = [part for part in next(iter(runs.values())) if part not in ("calls", "turns", "bytes")]
    rows = [
        [part, *(f"{run[part]['speed']:.2f} ({run[part]['tokens per pass']:.2f})" for run in runs.values())]
        for part in parts
    ]
    one = next(iter(runs.values()))
    return (
        f"`{found['command']}`: speed, and tokens per pass in brackets; {one['calls']} of {one['turns']} turns were "
        f"calls of a tool.\n\n" + table(["", *(f"`{name}`" for name in runs)], rows)
    )


def tables() -> str:
    """Tokens per pass by the text that a table learned from."""
    if not recorded("draft-tables"):
        return _LEFT
    found = load("draft-tables")
    kinds = [name for name in found["rows"]["nothing"] if isinstance(found["rows"]["nothing"][name], dict)]
    rows = [
        [
            name,
            f"{each['learned']:,}" if "learned" in each else "",
            *(f"{each[k]['tokens_per_pass']:.3f}" for k in kinds),
        ]
        for name, each in found["rows"].items()
    ]
    slopes = "; ".join(f"{name} {value:+.3f}" for name, value in found["per doubling"].items())
    return f"`{found['command']}`. Tokens per pass that a doubling adds: {slopes}.\n\n" + table(
        ["what `auto` begins with", "tokens learned from", *kinds], rows
    )


def regret() -> str:
    """Of `auto`, by kind of text, its speed by that of the best fixed choice."""
    found = load("draft-regret")
    runs = {name.partition(",")[0]: run for name, run in found["rows"].items() if ", by the best" not in name}
    fixed = [name for name in runs if not name.startswith("auto")]
    kinds = [kind for kind, own in runs["auto"].items() if isinstance(own, dict)]
    rows = []
    for kind in kinds:
        best = max(runs[name][kind]["speed"] for name in fixed)
        own = [runs[name][kind]["speed"] for name in runs if name not in fixed]
        rows.append(
            [kind, *(f"{runs[name][kind]['speed']:.2f}" for name in runs), *(f"{each / best:.3f}" for each in own)]
        )
    by = [f"`{name}` by the best fixed one" for name in runs if name not in fixed]
    return f"`{found['command']}`\n\n" + table(["speed", *(f"`{name}`" for name in runs), *by], rows)


SECTIONS: dict[str, Callable[[], str]] = {"draft-agents": agents, "draft-tables": tables, "draft-regret": regret}
