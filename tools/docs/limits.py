"""The generated parts of the documentation about the limits of ways of filling canvases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from figures import load, recorded, table
from filling import LEAST, share_right


def freedave() -> str:
    """Whether FreeDave writes what static decoding does, and in how many passes."""
    found = load("canvas-freedave")
    tasks = list(found["rows"][0]["saved"])
    head = [
        "states a pass", "cache", "other texts", "other orders", "passes, of static", "rows, of static",
        *(f"{task}: times fewer passes" for task in tasks),
    ]  # fmt: skip
    lines = [
        [
            str(row["drafts"]), row["cache"] or "none", f"{row['other texts']} of {row['prompts']}",
            str(row["other orders"]), f"{row['passes'] / row['static passes']:.2f}",
            f"{row['rows'] / row['static rows']:.2f}", *(f"{row['saved'][task]:.2f}" for task in tasks),
        ]
        for row in found["rows"]
    ]  # fmt: skip
    chance = found.get("random")
    said = "" if chance is None else (
        f"Of {chance['models']} models of random weights in float64, each in another setting, {chance['others']} wrote "
        "anything else, or in another order, than static decoding does.\n\n"
    )  # fmt: skip
    return f"`{found['command']}`\n\n{said}" + table(head, lines)


def company() -> str:
    """What company brings canvases, by model, precision and rows of one in a pass."""
    found = load("canvas-company")
    facts = found["settings"]
    lines = [
        [
            {"m": "size m, 6 million numbers", "smollm2": "the embedded model, 135 million"}[row["model"]],
            row["dtype"], "blocks of 4" if row["blocks"] else "the whole canvas", f"{row['rows a pass']:.1f}",
            f"{1e3 * row['alone']:.0f}", f"{1e3 * row['together'] / facts['together']:.0f}",
            f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})", f"{row['bound']:.2f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    head = [
        "model", "precision", "rows see", "rows of a canvas in a pass", "ms a canvas alone", "of sixteen", "times",
        "bound",
    ]  # fmt: skip
    return (
        f"`{found['command']}` on {found['machine']['processor']}, {found['machine']['threads']} threads, "
        f"{found['machine']['kernels']}: canvases of {facts['places']} positions after {facts['prompt']} tokens, "
        f"{facts['rounds']} rounds in turns.\n\n" + table(head, lines)
    )


def bits() -> str:
    """Passes against information, and names of two words, on an oracle."""
    found = load("canvas-bits")
    facts, seeds, names = found["settings"], found["seeds"], found["names"]
    head = ["", *(str(count) for count in facts["groups"]), "passes a nat", "most nats of a pass", "right"]
    lines = [
        [f"`{way}`", *(f"{count:g}" for count in row["passes"]), f"{row['passes per nat']:.2f}",
         f"{row['most nats of a pass']:.2f}", f"{row['right']:g}"]
        for way, row in seeds.items()
    ]  # fmt: skip
    lists = list(next(iter(names.values())))
    shown = [
        [f"`{way}`", *(f"{row[name]['right']:.2f} in {row[name]['passes']:.1f}" for name in lists)]
        for way, row in names.items()
    ]
    return (
        f"`{found['command']}`: {facts['draws']} draws each at temperature 1. Passes by groups of {facts['copies']} "
        f"copies of one of {facts['symbols']} symbols:\n\n{table(head, lines)}\n\nThe share of lists that come out "
        f"right, in so many passes:\n\n{table(['', *lists], shown)}"
    )


def experts() -> str:
    """How many experts a pass reads by its rows, and what is right, by way of sharing them."""
    found = load("canvas-experts-rows")
    rows, facts = found["rows"], found["settings"]
    counts = list(dict.fromkeys(row["rows"] for row in rows))
    lines = []
    for shared in dict.fromkeys(row["shared"] for row in rows):
        own = {row["rows"]: row for row in rows if row["shared"] == shared}
        told = [f"{row['read']:.1f}, {row['right'] / row['prompts']:.2f}" for row in own.values()]
        lines.append([f"`{shared}`" if "-" in shared else shared, *told])
    return (
        f"`{found['command']}`: {facts['prompts']} prompts of each task, {facts['experts']} experts. Experts of a "
        "layer that a pass reads, and the share of right answers, by rows of a pass:\n\n"
        + table(["", *(f"{count} rows" for count in counts)], lines)
    )


def limits(name: str, groups: Sequence[str]) -> str:
    """What becomes of a group of ways as one of their settings changes, by a model or by the oracle."""
    found = load(name)
    rows, facts = found["rows"], found["settings"]
    columns = [
        each for each in ("one answer", "several", "same", "passes", "rows", "tokens per pass", "tau")
        if each in rows["static"]
    ]  # fmt: skip
    asked = list(rows["static"]["right"])
    single = [task for task in asked if task in ("shuffle", "insert-random", "replace-random")] or asked
    parts = [f"`{found['command']}`: {facts['prompts']} prompts of each task, {facts['places']} places."]
    for group in groups:
        lines = [
            [
                f"`{way}`", *(f"{rows[way][name]:.{4 if name == 'same' else 2}f}" for name in columns),
                *(f"{rows[way]['right'][task] / facts['prompts']:.2f}" for task in single),
            ]
            for way in _WAYS[group]
        ]  # fmt: skip
        parts.append(table(["", *columns, *single], lines))
    return "\n\n".join(parts)


def lengths() -> str:
    """What canvases longer than their answers cost and get right, by way of filling; of tasks that the model can do."""
    found = load("canvas-lengths")
    facts = found["settings"]
    plain = [row for row in found["rows"] if row["way"] == "static"]
    shares = {
        task: share_right([row for row in plain if row["task"] == task])
        for task in dict.fromkeys(row["task"] for row in plain)
    }
    able = [task for task, share in shares.items() if share >= LEAST]
    rows = [row for row in found["rows"] if row["task"] in able]
    ways, places = (list(dict.fromkeys(row[name] for row in rows)) for name in ("way", "places"))

    def told(way: str, length: int) -> str:
        own, base = (
            [row for row in rows if row["way"] == each and row["places"] == length] for each in (way, "static")
        )
        passes = np.mean([row["passes"] for row in own])
        pairs = np.mean([row["pairs"] for row in own]) / np.mean([row["pairs"] for row in base])
        return f"{share_right(own):.2f} in {passes:.1f}, {pairs:.3f}"

    lines = []
    for way in ways:
        own = [row for row in rows if row["way"] == way]
        tau = np.mean([row["tau"] for row in own])
        lines.append([f"`{way}`", *(told(way, length) for length in places), f"{tau:.2f}"])
    answers = np.mean([row["tokens"] for row in rows if row["way"] == "static"])
    learned = ", ".join(f"{name} {value:g}" for name, value in facts["filter"].items())
    left = ", ".join(f"{task} is left out ({share:.2f})" for task, share in shares.items() if share < LEAST)
    return (
        f"`{found['command']}`: {facts['prompts']} prompts of each of {', '.join(able)}, whose answers have "
        f"{answers:.1f} tokens on average. The share right, passes, and pairs of rows and keys over those of static "
        f"decoding, by places of a canvas. FILTER, of itself: {learned}. Of what static decoding gets right in less "
        f"than {LEAST}, {left or 'there is nothing'}.\n\n"
        + table(["", *(f"{length} places" for length in places), "tau"], lines)
    )


_WAYS = {
    "caches": (
        "static", "static:cache=prefix",
        *(
            f"static:cache=dkv(refresh={refresh}{late})"
            for refresh in (1, 2, 4, 8, 99) for late in ("", ",delayed=false") if refresh > 1 or not late
        ),
        "static:cache=dkv(refresh=4,prompt=true)", "random", "random:cache=dkv-greedy",
        "random:cache=dkv-greedy(refresh=4)", "random:cache=dkv-greedy(refresh=4,window=0)",
    ),
    "rules": (
        "threshold:tau=0.9", "local-leap:radius=1", "local-leap:radius=2", "local-leap", "local-leap:radius=10",
        "local-leap:relaxed=0.6", "r2:width=99,group=1", "r2:width=99,passes=99", "r2:passes=99", "r2:width=99", "r2",
        "threshold:tau=0.8", "threshold:tau=0.75",
    ),
    "ccd": ("static", "ccd", "ccd-agreement", "ccd:adaptive=true", "ccd-agreement:adaptive=true"),
}  # fmt: skip
"""Ways that stand in one table."""


_EVERY: dict[str, Callable[[], str]] = {
    "canvas-experts-rows": experts, "canvas-freedave": freedave,
    "canvas-company": company, "canvas-bits": bits, "canvas-lengths": lengths,
    "canvas-rules": partial(limits, "canvas-rules", ("rules", "ccd")),
    "canvas-caches": partial(limits, "canvas-caches", ("caches",)),
}  # fmt: skip
SECTIONS = {name: section for name, section in _EVERY.items() if recorded(name)}
