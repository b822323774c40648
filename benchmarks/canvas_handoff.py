"""What a canvas is worth whose first denoising steps, or last, or some by chance, are the better one of two models.

    decodery train diffusion --out lists --steps 4000 --lr 2e-3 \\
        --tasks copy,reverse,sort,shuffle,insert-index,insert-random,remove-index,remove-random,replace-index,\\
    replace-random
    python benchmarks/canvas_handoff.py lists

Writes `benchmarks/results/canvas-handoff.json`. The second model is a copy of the first with coarser weights, as
`--second` says. Both write answers to examples that nobody has trained on, one token a pass; of these passes some are
the better model's. If what is written first decides most, they are worth the most at the beginning, as CoDe says of the
scales of images. right: the share of right answers, with its standard error; nothing is timed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import click
import torch

import decodery
from decodery.compression.base import transformed
from decodery.core.noise import mix
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.phase_handoff import SECOND, PhaseHandoff
from decodery.models.torch.transformer import Transformer
from decodery.training.diffusion import DiffusionRecipe, held_out
from decodery.training.lists import VOCABULARY
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parent / "results" / "canvas-handoff.json"


@dataclass(frozen=True)
class ByChance(PhaseHandoff):
    """Of the passes over every canvas, some by chance are the model's."""

    passes: int = 8

    def _by_model(self, canvas: Canvas) -> bool:
        order = sorted(range(self.passes), key=lambda each: mix(canvas.seed, each))
        return canvas.passes in order[: self.steps]


@click.command()
@click.argument("model")
@click.option("--second", default="int4:bits=2", show_default=True, help="How the second model is made.")
@click.option("--tasks", default="copy,reverse,sort,replace-index,insert-index,remove-index", show_default=True)
@click.option("--count", default=60, show_default=True)
def main(model: str, second: str, tasks: str, count: int) -> None:
    """Measure MODEL, a folder of `decodery train diffusion`."""
    torch.set_num_threads(1)
    lm, recipe = decodery.load(model, dtype="float32", device="cpu"), DiffusionRecipe(tuple(tasks.split(",")))
    assert isinstance(lm.model, Transformer)
    other, _ = transformed(lm.model, [resolve("compression", second)], [])
    asked, passes = held_out(recipe, count), recipe.canvas

    def measured(method: PhaseHandoff) -> dict[str, float]:
        engine, fillings = lm.engine(), []
        for seed, each in enumerate(asked):
            fill = lm.fill(lm.encode(" ".join(each.prompt), apply_chat_template=False), method, recipe.canvas)
            fill.seed = seed
            fillings.append(lm.begin(engine, fill))
        engine.run([each.work for each in fillings])
        right, spent = 0, [0, 0]
        for each, filling in zip(asked, fillings, strict=True):
            output = filling.output()
            right += each.right([VOCABULARY[token] for token in output.tokens if token != output.stopped_by])
            ledger = filling.canvas.trace.ledger.passes
            spent[0] += ledger.get("model", 0)
            spent[1] += ledger.get(SECOND, 0)
        share = right / count
        return {
            "right": round(share, 3),
            "standard error": round(math.sqrt(share * (1 - share) / count), 3),
            "passes of the model": round(spent[0] / count, 2),
            "passes of the second": round(spent[1] / count, 2),
        }

    rows = {}
    for steps in (0, passes // 4, passes // 2, 3 * passes // 4, passes):
        ways = {
            "first": PhaseHandoff(steps=steps, model=other),
            "last": PhaseHandoff(steps=passes - steps, begins="second", model=other),
            "by chance": ByChance(steps=steps, model=other, passes=passes),
        }
        for name in ways if 0 < steps < passes else ["first"]:
            rows[f"{name} {steps}"] = measured(ways[name])
            click.echo(json.dumps({f"{name} {steps}": rows[f"{name} {steps}"]}))
    command = f"python benchmarks/canvas_handoff.py {Path(model).name} --second {second}"
    made = {"command": command, "examples": count, "passes": passes, "tasks": tasks.split(","), "rows": rows}
    write_result(OUT, made)


if __name__ == "__main__":
    main()
