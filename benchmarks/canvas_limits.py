"""How ways of filling canvases come to their limits: caches by refresh, radii, R2 rule by rule, and CCD's two forms.

    decodery train diffusion --out DIR --tasks json,copy,expr --letters 12 --places 64 --steps 2000 --batch 32 --lr 2e-3
    python benchmarks/canvas_limits.py DIR --of caches --tasks json,copy --letters 12 --places 32 \\
        --out benchmarks/results/canvas-caches.json
    python benchmarks/canvas_limits.py --out benchmarks/results/canvas-rules.json

DIR is a model of `decodery train diffusion` that knows the tasks. Every way fills the same canvases as static decoding
without a cache. Without a model an oracle is asked about ParallelBench's ten tasks on lists, as in canvas_grid.py, by
all ways that have no cache. Interrupted, it goes on with the ways that are still to be measured. Nothing is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import decodery
from canvas_grid import PLACES, oracle
from decodery.diffusion.canvas import Canvas
from decodery.llm.llm import LLM
from decodery.training.lists import LISTS, canvas_length
from decodery_benchmarks.diffusion.job import kendall
from decodery_benchmarks.diffusion.tasks import SEVERAL, Item, drawn
from decodery_benchmarks.experiment import Experiment

_DKV = [
    f"static:cache=dkv(refresh={refresh}{delayed})"
    for refresh in (1, 2, 4, 8, 99)
    for delayed in ("", ",delayed=false")
    if refresh > 1 or not delayed
]
WAYS = {
    "caches": [
        "static", *_DKV, "static:cache=dkv(refresh=4,prompt=true)", "static:cache=prefix", "random",
        "random:cache=dkv-greedy", "random:cache=dkv-greedy(refresh=4)", "random:cache=dkv-greedy(refresh=4,window=0)",
    ],
    "near what is sure": [
        "threshold:tau=0.9", "local-leap:radius=1", "local-leap:radius=2", "local-leap", "local-leap:radius=10",
        "local-leap:relaxed=0.6", "threshold:tau=0.8", "threshold:tau=0.75",
    ],
    "R2's rules": [
        "threshold:tau=0.9", "r2:width=99,group=1", "r2:width=99,passes=99", "r2:passes=99", "r2:width=99", "r2",
        "threshold:tau=0.8",
    ],
    "CCD's forms": ["static", "ccd", "ccd-agreement", "ccd:adaptive=true", "ccd-agreement:adaptive=true"],
}  # fmt: skip
"""By what is compared."""
_TOGETHER = 100

Filled = tuple[str, bool, Canvas]
"""Of a prompt its task, whether the answer is right, and the canvas."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--of", help="groups of ways, all unless given")
    parser.add_argument("--tasks", default=",".join(LISTS))
    parser.add_argument("--letters", type=int, default=6)
    parser.add_argument("--places", type=int, help="of a canvas, what answers need unless given")
    parser.add_argument("--prompts", type=int, default=50, help="of each task")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tasks = tuple(given.tasks.split(","))
    named = "".join(f"--{name} {getattr(given, name)} " for name in ("of", "places") if getattr(given, name))
    if given.folder:
        named = f"DIR {named}--tasks {given.tasks} "
    command = f"python benchmarks/canvas_limits.py {named}--letters {given.letters} --prompts {given.prompts} "
    command += f"--out {given.out}"
    places = given.places or canvas_length(tasks, given.letters)
    facts = {"prompts": given.prompts, "places": places}
    chosen = given.of.split(",") if given.of else WAYS
    ways = list(dict.fromkeys(way for each in chosen for way in WAYS[each]))
    reference: list[Filled] = []
    if given.folder:
        lm = decodery.load(given.folder, dtype="float32", device="cpu")
        items = drawn(tasks, given.prompts, given.letters, 0)
        reference = filled(lm, "static", items, places)
    else:
        facts["places"] = PLACES
        ways = [way for way in ways if "cache=" not in way]

    def run(name: str) -> dict[str, Any]:
        if given.folder:
            return row(filled(lm, name, items, places), reference)
        return of_oracle([oracle(name, task, given.prompts) for task in LISTS])

    Experiment({"name": ways}, run, settings=facts).measure(given.out, command)


def of_oracle(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all tasks come to together."""
    passes = float(np.mean([each["passes"] for each in tasks]))
    return {
        **{
            name: round(float(np.mean([each["right"] / each["prompts"] for each in tasks
                                       if (each["task"] in SEVERAL) == several])), 4)
            for name, several in (("one answer", False), ("several", True))
        },
        "passes": round(passes, 3),
        "tokens per pass": round(
            float(np.mean([each["tokens_per_pass"] * each["passes"] for each in tasks])) / passes, 3
        ),
        "right": {each["task"]: each["right"] for each in tasks},
    }  # fmt: skip


def filled(lm: LLM, way: str, items: list[Item], places: int) -> list[Filled]:
    """Of each prompt its task, whether the answer is right, and the canvas."""
    found = list[Filled]()
    for first in range(0, len(items), _TOGETHER):
        some, engine = items[first : first + _TOGETHER], lm.engine()
        begun = [
            lm.begin(engine, lm.fill(lm.encode(each.prompt, apply_chat_template=False), way, places)) for each in some
        ]
        engine.run([each.work for each in begun])
        found += [(item.task, item.right(each.output()), each.canvas) for item, each in zip(some, begun, strict=True)]
    return found


def row(found: list[Filled], reference: list[Filled]) -> dict[str, Any]:
    """right: by task. same: the share of an answer's places that hold what static decoding has there, its end with
    them. rows, pairs: of a canvas.
    """
    canvases = [canvas for _, _, canvas in found]
    right: dict[str, int] = {}
    for task, good, _ in found:
        right[task] = right.get(task, 0) + good
    same = [one.tokens[answer(other)] == other.tokens[answer(other)]
            for (_, _, one), (_, _, other) in zip(found, reference, strict=True)]  # fmt: skip
    shares = {
        name: [right[task] for task in right if (task in SEVERAL) == several]
        for name, several in (("one answer", False), ("several", True))
    }
    each = len(found) / len(right)
    return {
        **{name: round(sum(own) / each / len(own), 4) for name, own in shares.items() if own},
        "same": round(float(np.mean(np.concatenate(same))), 4),
        "passes": round(float(np.mean([canvas.passes for canvas in canvases])), 3),
        "rows": round(float(np.mean([canvas.rows for canvas in canvases])), 2),
        "pairs": round(float(np.mean([canvas.pairs for canvas in canvases])), 1),
        "tokens per pass": round(
            sum(len(canvas.output) for canvas in canvases) / sum(canvas.passes for canvas in canvases), 3
        ),
        "tau": round(float(np.mean([kendall(canvas) for canvas in canvases])), 3),
        "right": right,
    }


def answer(canvas: Canvas) -> slice:
    return slice(canvas.prompt_length, canvas.prompt_length + len(canvas.output))


if __name__ == "__main__":
    main()
