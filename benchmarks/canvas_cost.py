"""What filling a canvas costs: beside its passes, with caches, and in company.

    python benchmarks/canvas_cost.py --out benchmarks/results/canvas-cost.json

The model is of size m with random weights: what a pass takes does not hang on what was learned, and static decoding
takes as many passes whatever it writes. Ways are timed in turns, in one process; run it with nothing else running.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.texts import fill_all
from decodery.engine.engine import Engine
from decodery.models.torch.transformer import Transformer
from decodery.training.diffusion import DiffusionRecipe, untrained
from decodery_benchmarks.results import write_result

PROMPT, PLACES = 32, 64
WAYS = (
    "static:steps=32", "static:steps=32,block=16", "static:steps=32,block=16,cache=prefix",
    "static:steps=32,block=16,cache=dual", "static:steps=32,cache=dkv(refresh=4)",
    "static:steps=32,cache=window(inner=16,outer=32,refresh=4)", "random:steps=32",
)  # fmt: skip
TOGETHER = (1, 4, 16)
COMPANY = {
    "": WAYS[0], "dual cache, ": WAYS[3], "window of 4, ": "static:steps=64,cache=window(inner=4,outer=16,refresh=64)",
}  # fmt: skip
"""Ways that are timed in company too: of whole canvases a pass, of a block of 16, and of few places."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = untrained(DiffusionRecipe(size="m"))
    times: dict[str, list[dict[str, float]]] = {}
    for turn in range(given.rounds + 1):
        for way in WAYS:
            found = filled(model, way, 1, turn)
            # The first turn warms up.
            if turn:
                times.setdefault(way, []).append(found)
        for name, way in COMPANY.items():
            for count in TOGETHER:
                found = filled(model, way, count, turn)
                if turn:
                    times.setdefault(f"{name}{count} together", []).append(found)
        print(f"turn {turn} of {given.rounds}", flush=True)
    results: dict[str, Any] = {}
    for name, rounds in times.items():
        results[name] = {key: round(median(each[key] for each in rounds), 4) for key in rounds[0]}
        base = WAYS[0] if name in WAYS else f"{name.rpartition(', ')[0]}, {TOGETHER[0]} together".removeprefix(", ")
        ratios = [each["seconds"] / other["seconds"] for each, other in zip(rounds, times[base], strict=True)]
        results[name]["ratio"] = round(median(ratios), 3)
        results[name]["least"], results[name]["most"] = round(min(ratios), 3), round(max(ratios), 3)
    facts = {"prompt": PROMPT, "places": PLACES, "rounds": given.rounds}
    command = f"python benchmarks/canvas_cost.py --out {given.out}"
    write_result(given.out, {"command": command, "settings": facts, "rows": results})


def filled(model: Transformer, way: str, count: int, turn: int) -> dict[str, float]:
    """seconds: of a canvas. beside: what is not passes, of all. passes, rows, pairs: of a canvas."""
    draws = np.random.default_rng(turn)
    allowed = np.setdiff1d(np.arange(model.vocab_size), [model.config.mask_id])
    canvases = [Canvas.of(model, draws.choice(allowed, PROMPT), PLACES) for _ in range(count)]
    spent, forward = 0.0, model.forward

    def timed(*arguments: Any, **settings: Any) -> Any:
        nonlocal spent
        begin = perf_counter()
        try:
            return forward(*arguments, **settings)
        finally:
            spent += perf_counter() - begin

    model.forward = timed  # type: ignore[method-assign]
    begin = perf_counter()
    try:
        with torch.no_grad():
            fill_all(Engine(model), model, canvases, resolve("diffusion", way), 0.0)
    finally:
        del model.forward
    seconds = perf_counter() - begin
    first = canvases[0]
    return {
        "seconds": seconds / count,
        "beside": 1 - spent / seconds,
        "passes": float(first.passes),
        "rows": float(first.rows),
        "pairs": float(first.pairs),
    }


if __name__ == "__main__":
    main()
