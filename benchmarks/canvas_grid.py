"""ParallelBench's grid: order of writing, passes and block length, thresholds and factors, of a model and of an oracle.

    python benchmarks/canvas_grid.py DIR --letters 8 --work WORK --out benchmarks/results/canvas-grid.json

DIR is a model of `decodery train diffusion` that knows ParallelBench's ten tasks on lists; blocks and passes are those
of a canvas of ten places, which lists of up to eight letters take. The oracle knows all right answers to each prompt,
of lists of up to six letters, and so every marginal: what it loses nobody could keep in as few passes. Temperature 0,
as published. Interrupted, it goes on with the ways that are still to be measured. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

import decodery
from decodery.bench.canvases.job import measure
from decodery.bench.canvases.settings import CanvasSettings
from decodery.bench.result import read
from decodery.core.ask import drive
from decodery.diffuse.canvas import Canvas
from decodery.diffuse.run import filled
from decodery.registry import resolve
from decodery.testing import OracleDenoiser
from decodery.train.lists import END, LISTS, MASK, NEW, TASKS, VOCABULARY, Example, examples

ORDERS = {
    "random": "random", "probability": "static", "margin": "static:measure=margin", "entropy": "static:measure=entropy",
}  # fmt: skip
CELLS = ((10, 10), (10, 5), (10, 2), (10, 1), (5, 10), (5, 4), (5, 2), (2, 10), (2, 5), (1, 10))
"""Block lengths and passes over the canvas."""
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
FACTORS = (0.7, 1.0, 1.3, 1.6, 1.9)
PLACES, ORACLE_LETTERS, SEED = 10, 6, 19


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--letters", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=30, help="of each task")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    ways = list(named())
    asked = CanvasSettings(
        given.folder, "float32", tuple(ways), letters=given.letters, prompts=given.prompts, max_new_tokens=PLACES
    )
    earlier = read(given.work) if (given.work / "results.json").is_file() else None
    lm = decodery.load(given.folder, dtype="float32", device="cpu")
    found = measure(
        lm, asked, given.work, lambda what, done, total: print(done, total, what, flush=True), earlier=earlier
    )
    rows = [slim(row) for row in found["rows"]]
    for number, way in enumerate(ways):
        print("oracle", number, len(ways), way, flush=True)
        rows += [oracle(way, task, given.prompts) for task in LISTS]
    settings = f"--letters {given.letters} --prompts {given.prompts}"
    command = f"python benchmarks/canvas_grid.py DIR {settings} --work WORK --out {given.out}"
    facts = {"prompts": given.prompts, "places": PLACES, "letters": given.letters, "oracle letters": ORACLE_LETTERS}
    given.out.write_text(json.dumps({"command": command, "facts": facts, "rows": rows}, indent=1) + "\n")


def named() -> Iterator[str]:
    """All ways of filling a canvas."""
    for way in ORDERS.values():
        for block, passes in CELLS:
            yield f"{way}{',' if ':' in way else ':'}block={block},steps={passes}"
    yield from (f"threshold:tau={tau:g}" for tau in THRESHOLDS)
    yield from (f"factor:phi={phi:g}" for phi in FACTORS)


def slim(row: dict[str, Any]) -> dict[str, Any]:
    """What the grid is read for."""
    kept = ("method", "task", "prompts", "right", "passes", "tokens_per_pass")
    return {"of": "model"} | {key: row[key] for key in kept}


def oracle(way: str, task: str, prompts: int) -> dict[str, Any]:
    """What is right of what the oracle writes this way."""
    draws, filling = np.random.default_rng(SEED), resolve("diffuse", way)
    right = passes = tokens = 0
    for number, example in enumerate(examples((task,), prompts, draws, ORACLE_LETTERS)):
        words = [*example.posed, NEW, END]
        spoken = [*sorted(set(words), key=VOCABULARY.index), MASK]
        known = [[spoken.index(word) for word in padded(answer)] for answer in answers(example)]
        model = OracleDenoiser(known, vocab_size=len(spoken))
        canvas = Canvas.of(model, [0], PLACES, seed=number)
        drive(filled(model, canvas, filling))
        said = [spoken[token] for token in canvas.output]
        end = said.index(END) if END in said else len(said)
        right += example.right(said[:end]) and set(said[end:]) <= {END}
        passes, tokens = passes + canvas.passes, tokens + min(end + 1, PLACES)
    return {
        "of": "oracle", "method": way, "task": task, "prompts": prompts, "right": right,
        "passes": round(passes / prompts, 3), "tokens_per_pass": round(tokens / passes, 4),
    }  # fmt: skip


def answers(example: Example) -> list[list[str]]:
    """All right answers."""
    items = example.posed
    several = {
        "shuffle": lambda: [list(each) for each in permutations(items)],
        "insert-random": lambda: [[*items[:at], NEW, *items[at:]] for at in range(len(items) + 1)],
        "remove-random": lambda: [items[:at] + items[at + 1 :] for at in range(len(items))],
        "replace-random": lambda: [[*items[:at], NEW, *items[at + 1 :]] for at in range(len(items))],
    }
    found = several[example.task]() if example.task in several else [example.answer]
    return [answer for answer in found if TASKS[example.task].right(items, answer)]


def padded(answer: list[str]) -> list[str]:
    return answer + [END] * (PLACES - len(answer))


if __name__ == "__main__":
    main()
