"""How many experts a pass reads by how many rows it has, and what sharing them keeps right.

    decodery train diffusion --out DIR --size s-moe --tasks copy,reverse,sort,replace-random,shuffle --steps 1200 \\
        --batch 48 --lr 1.5e-3
    python benchmarks/canvas_experts.py DIR --out benchmarks/results/canvas-experts-rows.json

DIR is a mixture of `decodery train diffusion`. A pass has the rows of a block, whose surroundings a dual cache keeps,
or those of all, prompt and canvas; passes that fill the cache are not counted. `one each` is without any sharing a
model whose rows take one expert in place of two. Interrupted, it goes on. Nothing is timed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import filled
from decodery.llm.llm import LLM
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import ForwardResult, answer
from decodery.training.diffusion import DiffusionRecipe, held_out
from decodery.training.lists import VOCABULARY, ListExample, canvas_length
from decodery_benchmarks.experiment import Experiment

TASKS = ("copy", "reverse", "sort", "replace-random", "shuffle")
BLOCKS = (2, 4, 8, None)
"""Places of a block; None is all rows, without a cache."""
ONE = "one each"
SHARED = (
    "none", ONE, "des-seq(each=1)", "des-vote(beta=0.6)", "des-vote(beta=0.5)", "des-vote(beta=0.4)",
    "des-vote(beta=0.3)", "des-vote(beta=0.2)",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--letters", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=50, help="of each task")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = decodery.load(given.folder, dtype="float32", device="cpu")
    items = held_out(DiffusionRecipe(TASKS, given.letters), given.prompts * len(TASKS))
    command = (
        f"python benchmarks/canvas_experts.py DIR --letters {given.letters} --prompts {given.prompts} --out {given.out}"
    )
    grid = {"block": BLOCKS, "shared": SHARED}
    facts = {"prompts": given.prompts, "experts": lm.model.config.experts}
    run = partial(measured, lm, items=items, letters=given.letters)
    Experiment(grid, run, settings=facts).measure(given.out, command)


def measured(lm: LLM, block: int | None, shared: str, items: list[ListExample], letters: int) -> dict[str, Any]:
    """right: of all answers. rows: of a counted pass. read: experts that it reads in a layer, on average."""
    model = lm.model
    assert isinstance(model, Transformer)
    if shared == ONE:
        model = Transformer(replace(model.config, experts_per_token=1), model.weights)
    way = "static" if block is None else f"static:block={block},cache=dual"
    if shared not in ("none", ONE):
        way += (":" if block is None else ",") + f"experts={shared}"
    places, read, right = canvas_length(TASKS, letters), list[int](), 0
    counted = block
    for item in items:
        canvas = Canvas.of(
            model, lm.encode(" ".join(item.prompt), apply_chat_template=False), places, eos_ids=lm.tokenizer.eos_ids
        )
        counted = block or len(canvas)
        read += experts(model, canvas, way, counted)
        right += item.right([VOCABULARY[token] for token in canvas.output if token not in canvas.eos_ids])
    return {
        "prompts": len(items), "right": right, "rows": counted, "passes": len(read),
        "read": round(float(np.mean(read)) / model.config.num_layers, 3),
    }  # fmt: skip


def experts(model: Transformer, canvas: Canvas, way: str, rows: int) -> list[int]:
    """Fills a canvas; returns how many experts, of all layers together, each pass of so many rows reads."""
    asking, found = filled(model, canvas, resolve("diffusion", way)), list[int]()
    with torch.no_grad():
        asks = next(asking)
        while True:
            scored = answer(asks)
            for ask, each in zip(asks, scored, strict=True):
                assert isinstance(each, ForwardResult) and each.cost is not None, each
                if len(ask.segment) == rows:
                    found.append(each.cost.experts)
            try:
                asks = asking.send([each for each in scored if isinstance(each, ForwardResult)])
            except StopIteration:
                return found


if __name__ == "__main__":
    main()
