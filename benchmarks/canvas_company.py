"""What company brings canvases: how much longer sixteen of them take together than one, by model, precision and rows.

    python benchmarks/canvas_company.py --out benchmarks/results/canvas-company.json

Models are of size m with random weights, as in canvas_cost.py, and the embedded model made to see both ways: what a
pass takes does not hang on what is written. `blocks of 4` are models whose rows see their own block of four and those
before it, as SDAR's, under the prefix cache, which is exact there; they compute six rows of a canvas a pass. Runs of
one canvas and of sixteen take turns; run it with nothing else running. Interrupted, it goes on with the next case.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.texts import fill_all
from decodery.engine.engine import Engine
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.training.diffusion import DiffusionRecipe, untrained
from decodery.training.llada_folder import write_llada
from decodery_benchmarks.experiment import Experiment

PROMPT, PLACES, TOGETHER = 32, 16, 16
WHOLE, BLOCKS = "static:steps=4", "static:cache=prefix"
CASES = (
    ("m", "float32", WHOLE), ("m", "int8", WHOLE), ("m", "float32", BLOCKS), ("m", "int8", BLOCKS),
    ("smollm2", "float32", BLOCKS), ("smollm2", "bfloat16", BLOCKS), ("smollm2", "int8", BLOCKS),
    ("smollm2", "int4", BLOCKS),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    facts = {"prompt": PROMPT, "places": PLACES, "together": TOGETHER, "rounds": given.rounds}
    command = f"python benchmarks/canvas_company.py --out {given.out}"

    def run(model: str, dtype: str, way: str) -> dict[str, Any]:
        blocks = 4 if way == BLOCKS else None
        writer = made(model, dtype, blocks)
        filled(writer, way, 1, 0)
        pairs = [[filled(writer, way, count, turn) for count in (1, TOGETHER)] for turn in range(given.rounds)]
        ratios = [TOGETHER * alone / together for (alone, _), (together, _) in pairs]
        return {
            "blocks": blocks,
            "alone": round(median(alone for (alone, _), _ in pairs), 4),
            "together": round(median(together for _, (together, _) in pairs), 4),
            "rows a pass": round(pairs[0][0][1], 2),
            "ratio": round(median(ratios), 2), "least": round(min(ratios), 2), "most": round(max(ratios), 2),
            "bound": round(bound(writer, round(pairs[0][0][1])), 2),
        }  # fmt: skip

    grid = [dict(zip(("model", "dtype", "way"), case, strict=True)) for case in CASES]
    Experiment(grid, run, settings=facts).measure(given.out, command)


@cache
def loaded(name: str, dtype: str) -> Transformer:
    if name == "m":
        with TemporaryDirectory() as folder:
            write_llada(untrained(DiffusionRecipe(size="m")), Path(folder))
            found = load(folder, dtype=dtype, device="cpu").model
    else:
        found = load(name, dtype=dtype, device="cpu").model
    assert isinstance(found, Transformer)
    return found


def made(name: str, dtype: str, block: int | None) -> Transformer:
    """The model, its rows seeing all others, or those of their block and before it."""
    base = loaded(name, dtype)
    mask = base.config.mask_id if base.config.mask_id is not None else 0
    return Transformer(replace(base.config, causal=False, mask_id=mask, block_length=block), base.weights)


def filled(model: Transformer, way: str, count: int, turn: int) -> tuple[float, float]:
    """Seconds that `count` canvases take together, and the rows of one in a pass."""
    draws = np.random.default_rng(turn)
    allowed = np.setdiff1d(np.arange(model.vocab_size), [model.config.mask_id])
    canvases = [Canvas.of(model, draws.choice(allowed, PROMPT), PLACES) for _ in range(count)]
    begin = perf_counter()
    with torch.no_grad():
        fill_all(Engine(model), model, canvases, resolve("diffusion", way), 0.0)
    return perf_counter() - begin, canvases[0].rows / canvases[0].passes


def bound(model: Transformer, rows: int) -> float:
    """How much faster one bare pass of sixteen canvases' rows is than sixteen passes of one canvas's."""

    def seconds(segments: int) -> float:
        tokens = np.arange(rows) % model.vocab_size
        batch = Batch([Segment(np.arange(rows), tokens, logit_rows=list(range(rows // 2))) for _ in range(segments)])
        begin = perf_counter()
        with torch.no_grad():
            model.forward(batch)
        return perf_counter() - begin

    seconds(1)
    pairs = [(seconds(1), seconds(TOGETHER)) for _ in range(9)]
    return median(TOGETHER * alone / together for alone, together in pairs)


if __name__ == "__main__":
    main()
