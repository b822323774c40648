"""Passes against information, and names of two words, on an oracle that knows every marginal.

    python benchmarks/canvas_bits.py --out benchmarks/results/canvas-bits.json

Seeds: texts of one to six groups, each of three copies of one symbol, any of four. So a text has ln 4 nats a group, all
of it in one token of each. A rule that writes only what is sure has to wait for these tokens one by one.
Names: lists of three and four names, of one word and of two, in another order or with one replaced. Nothing is timed.
"""

from __future__ import annotations

import argparse
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import filled
from decodery.step.forward_request import run_sync
from decodery.testing import OracleDenoiser
from decodery_benchmarks.results import write_result

GROUPS, COPIES, SYMBOLS = range(1, 7), 3, 4
SEEDED = (
    "static", "threshold:tau=0.9,block=3", "threshold:tau=0.9", "factor", "local-leap", "r2", "explore-exploit:block=3",
    "explore-exploit:block=3,branches=3", "explore-exploit:block=3,blocks=6,share=0",
)  # fmt: skip
NAMED = ("static", "threshold:tau=0.9", "threshold:tau=0.7", "threshold:tau=0.5", "factor", "static:steps=2",
         "random:steps=2")  # fmt: skip
_DRAWS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    command, facts = f"python benchmarks/canvas_bits.py --out {given.out}", {"draws": _DRAWS, "symbols": SYMBOLS}
    found = {
        "command": command,
        "settings": facts | {"copies": COPIES, "groups": list(GROUPS)},
        "seeds": {way: seeds(way) for way in SEEDED},
        "names": {way: {name: names(way, name) for name in NAMES} for way in NAMED},
    }
    write_result(given.out, found, summary=["seeds", "names"])


def seeds(way: str) -> dict[str, Any]:
    """By groups the mean passes; passes per nat, by least squares; the most nats of a pass; and the share right."""
    passes, most, right, points = [], 0.0, list[bool](), list[tuple[float, int]]()
    for count in GROUPS:
        marks = np.stack(np.meshgrid(*[np.arange(SYMBOLS)] * count, indexing="ij"), -1).reshape(-1, count)
        answers = marks.repeat(COPIES, axis=1)
        model, known = OracleDenoiser(answers, vocab_size=SYMBOLS + 1), {tuple(each) for each in answers.tolist()}
        own = [run(model, way, answers.shape[1], seed) for seed in range(_DRAWS)]
        passes.append(round(float(np.mean([canvas.passes for canvas in own])), 2))
        right += [tuple(canvas.output) in known for canvas in own]
        most = max(most, *(each.nats for canvas in own for each in canvas.rounds))
        points += [(sum(each.nats for each in canvas.rounds), canvas.passes) for canvas in own]
    nats, counts = (np.array(each, dtype=float) for each in zip(*points, strict=True))
    return {
        "passes": passes, "passes per nat": round(float(np.polyfit(nats, counts, 1)[0]), 2),
        "most nats of a pass": round(most, 2), "right": round(float(np.mean(right)), 3),
    }  # fmt: skip


def names(way: str, name: str) -> dict[str, float]:
    """Of lists of three names and of four, the share that comes out right, and the passes."""
    right, passes = list[bool](), list[int]()
    for size in (3, 4):
        known = NAMES[name](size)
        model = OracleDenoiser(known, vocab_size=20)
        length = len(known[0])
        if "steps=2" in way and length % 2:
            length += 1
            model = OracleDenoiser([[*each, 18] for each in known], vocab_size=20)
        for seed in range(_DRAWS):
            canvas = run(model, way, length, seed)
            right.append(canvas.output[: len(known[0])] in known)
            passes.append(canvas.passes)
    return {"right": round(float(np.mean(right)), 3), "passes": round(float(np.mean(passes)), 2)}


def spelled(names_: list[list[int]]) -> list[int]:
    return [word for name in names_ for word in name]


def shuffled(words: int, size: int) -> list[list[int]]:
    """All other orders of a list of names of so many words, of which no two are the same."""
    listed = [[words * at + word for word in range(words)] for at in range(size)]
    return [spelled(list(each)) for each in permutations(listed) if list(each) != listed]


def replaced(words: int, size: int) -> list[list[int]]:
    """All lists with one name replaced by a new one."""
    listed, new = [[words * at + word for word in range(words)] for at in range(size)], [17, 16][:words]
    return [spelled([*listed[:at], new, *listed[at + 1 :]]) for at in range(size)]


NAMES = {
    "shuffle, one word": lambda size: shuffled(1, size), "shuffle, two words": lambda size: shuffled(2, size),
    "replace, one word": lambda size: replaced(1, size), "replace, two words": lambda size: replaced(2, size),
}  # fmt: skip


def run(model: OracleDenoiser, way: str, length: int, seed: int) -> Canvas:
    canvas = Canvas.of(model, [0], length, seed=seed)
    # At temperature 1, where equal marginals are drawn from and not decided by who stands first.
    run_sync(filled(model, canvas, resolve("diffusion", way), 1.0))
    return canvas


if __name__ == "__main__":
    main()
