"""The table of drafters: which are ready on any model, what the others need, and how fast they were measured here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from figures import RESULTS, load, table

from decodery.bench.result import read
from decodery.core import registry
from decodery.core.registry import Method
from decodery.extend import Drafter
from decodery.llm.readiness import readiness
from decodery.testing import tiny_transformer

_RUN = "model-free"
"""The run that most drafters were measured in."""
_FURTHER = ("draft-heads", "draft-small-heads")
"""Runs that measured drafters with a trained part. The first run of each counts."""
_GROUPS = ("any model", "any model, slower on CPUs", "after training", "second model", "other drafters", "a setting")
"""What stands in the column `ready on`, in the order of the rows."""
_TRAIN = re.compile(
    r"`?(decodery train [a-z0-9-]+(?: --kind [\w-]+)?(?: --images PROMPTS)?(?: -m MODEL FILES --out DIR)?)`?"
)


class _Measured(NamedTuple):
    """One row of a run. spec: the drafter with its settings; speed: relative to plain decoding in the same run."""

    spec: str
    tokens_per_pass: float
    speed: float
    shown: str
    questions: int


def drafters() -> str:
    """One row per drafter that was measured or is ready on any model; of each group the fastest first."""
    found = [method for method in registry.methods() if issubclass(method.cls, Drafter)]
    missing, measured = readiness(found, tiny_transformer(0)), list(_measured())
    rows, others = [], list[str]()
    for method in found:
        group = _group(method, missing[method.family, method.name])
        runs = [each for each in measured if _name(each.spec) == method.name]
        best = max(runs, key=lambda each: each.speed, default=None)
        if best is None and group != "any model":
            others.append(f"`{method.name}`")
            continue
        figures = ["", "", ""] if best is None else [best.shown, f"{best.tokens_per_pass:.2f}", str(best.questions)]
        needs = _needs(method) if group == "after training" else ""
        rank = (_GROUPS.index(group), -(best.speed if best else 0), method.name)
        rows.append((rank, [f"`{method.name}`", group, *figures, needs]))
    run = read(RESULTS / f"{_RUN}.json")
    machine = run["machine"]
    where = (
        f"{run['model']['name']} in {run['model']['dtype']} on {machine['processor']}, {machine['threads']} threads. "
        "Greedy, one prompt at a time, questions of Spec-Bench. Each drafter with the best of its measured settings. "
        "Drafters that remember earlier texts begin every prompt with an empty memory. Empty cells were not measured."
    )
    head = ["drafter", "ready on", "speed-up here", "tokens per pass", "questions", "needs"]
    lines = table(head, [row for _, row in sorted(rows)]).splitlines()
    rest = f"Not measured in these runs: {', '.join(sorted(others))}. [All drafters](methods.md#drafters)."
    return "\n".join([where, "", lines[0], "|---|---|---:|---:|---:|---|", *lines[2:], "", rest])


def _measured() -> Iterator[_Measured]:
    result = read(RESULTS / f"{_RUN}.json")
    rows = {row["method"]: row for row in result["rows"] if row["category"] == "all"}
    for name, row in rows.items():
        if f"{name} (cold)" not in rows:
            shown = f"{row['speedup']:.2f} ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
            spec = name.removesuffix(" (cold)")
            yield _Measured(spec, row["tokens_per_pass"], row["speedup"], shown, row["prompts"])
    for file in _FURTHER:
        run = load(file)["rows"][0]
        for name, row in run["methods"].items():
            if _name(name) not in {_name(each) for each in rows}:
                speed = row["speed"]["all"]
                yield _Measured(name, row["tokens_per_pass"], speed, f"{speed:.2f}", run["settings"]["questions"])


def _name(spec: str) -> str:
    return spec.partition(":")[0].partition(" ")[0]


def _group(method: Method, missing: str) -> str:
    if not missing:
        return "any model, slower on CPUs" if method.slower else "any model"
    said = " ".join(method.requirements)
    if "train" in said:
        return "after training"
    if "second model" in said:
        return "second model"
    return "other drafters" if "drafter" in missing or "draft model" in missing else "a setting"


def _needs(method: Method) -> str:
    return _TRAIN.sub(r"`\1`", method.requirements[-1])


SECTIONS: dict[str, Callable[[], str]] = {"drafters": drafters}
