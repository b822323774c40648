"""ParallelBench's grid: order of writing, passes and block length, thresholds and factors, of a model and of an oracle.

    python benchmarks/canvas_grid.py DIR --letters 8 --out benchmarks/results/canvas-grid.json

DIR is a model of `decodery train diffusion` that knows ParallelBench's ten tasks on lists; blocks and passes are those
of a canvas of ten places, which lists of up to eight letters take. The oracle knows all right answers to each prompt,
of lists of up to six letters, and so every marginal: what it loses is lost by the way alone. Temperature 0, as
published. Interrupted, it goes on with the ways that are still to be measured. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

import decodery
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import filled
from decodery.llm.llm import LLM
from decodery.step.forward_request import run_sync
from decodery.testing import OracleDenoiser
from decodery.training.lists import END, LISTS, MASK, NEW, TASKS, VOCABULARY, ListExample, examples
from decodery_benchmarks.diffusion.tasks import drawn
from decodery_benchmarks.experiment import Experiment

ORDERS = {
    "random": "random", "probability": "static", "margin": "static:measure=margin", "entropy": "static:measure=entropy",
}  # fmt: skip
CELLS = ((10, 10), (10, 5), (10, 2), (10, 1), (5, 10), (5, 4), (5, 2), (2, 10), (2, 5), (1, 10))
"""Block lengths and passes over the canvas."""
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
FACTORS = (0.7, 1.0, 1.3, 1.6, 1.9)
PLACES, ORACLE_LETTERS, SEED = 10, 6, 19
_TOGETHER = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--letters", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lm = decodery.load(given.folder, dtype="float32", device="cpu")
    facts = {"prompts": given.prompts, "places": PLACES, "letters": given.letters, "oracle letters": ORACLE_LETTERS}
    command = (
        f"python benchmarks/canvas_grid.py DIR --letters {given.letters} --prompts {given.prompts} --out {given.out}"
    )

    def run(method: str) -> list[dict[str, Any]]:
        own = model_rows(lm, method, given.prompts, given.letters)
        return own + [oracle(method, task, given.prompts) for task in LISTS]

    Experiment({"method": list(named())}, run, settings=facts).measure(given.out, command)


def named() -> Iterator[str]:
    """All ways of filling a canvas."""
    for way in ORDERS.values():
        for block, passes in CELLS:
            yield f"{way}{',' if ':' in way else ':'}block={block},steps={passes}"
    yield from (f"threshold:tau={tau:g}" for tau in THRESHOLDS)
    yield from (f"factor:phi={phi:g}" for phi in FACTORS)


def model_rows(lm: LLM, way: str, prompts: int, letters: int) -> list[dict[str, Any]]:
    """What is right of what the model writes this way, task by task."""
    items, found = drawn(tuple(LISTS), prompts, letters, 0), dict[str, list[tuple[bool, Canvas]]]()
    for first in range(0, len(items), _TOGETHER):
        some, engine = items[first : first + _TOGETHER], lm.engine()
        begun = [
            lm.begin(engine, lm.fill(lm.encode(each.prompt, apply_chat_template=False), way, PLACES)) for each in some
        ]
        engine.run([each.work for each in begun])
        for item, each in zip(some, begun, strict=True):
            found.setdefault(item.task, []).append((item.right(each.output()), each.canvas))
    return [
        row("model", way, task, [good for good, _ in runs], [canvas.passes for _, canvas in runs],
            [len(canvas.output) for _, canvas in runs])
        for task, runs in found.items()
    ]  # fmt: skip


def row(of: str, way: str, task: str, right: list[bool], passes: list[int], tokens: list[int]) -> dict[str, Any]:
    """tokens: up to the first end and with it."""
    return {
        "of": of, "method": way, "task": task, "prompts": len(right), "right": sum(right),
        "passes": round(sum(passes) / len(right), 3), "tokens_per_pass": round(sum(tokens) / sum(passes), 4),
    }  # fmt: skip


def oracle(way: str, task: str, prompts: int) -> dict[str, Any]:
    """What is right of what the oracle writes this way."""
    draws, filling = np.random.default_rng(SEED), resolve("diffusion", way)
    right, passes, tokens = list[bool](), list[int](), list[int]()
    for number, example in enumerate(examples((task,), prompts, draws, ORACLE_LETTERS)):
        words = [*example.posed, NEW, END]
        spoken = [*sorted(set(words), key=VOCABULARY.index), MASK]
        known = [[spoken.index(word) for word in padded(answer)] for answer in answers(example)]
        model = OracleDenoiser(known, vocab_size=len(spoken))
        canvas = Canvas.of(model, [0], PLACES, seed=number)
        run_sync(filled(model, canvas, filling))
        said = [spoken[token] for token in canvas.output]
        end = said.index(END) if END in said else len(said)
        right.append(example.right(said[:end]) and set(said[end:]) <= {END})
        passes.append(canvas.passes)
        tokens.append(min(end + 1, PLACES))
    return row("oracle", way, task, right, passes, tokens)


def answers(example: ListExample) -> list[list[str]]:
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
