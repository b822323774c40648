"""What training a diffusion model on its own decoding brings: CD4LM's distillation and R2's tuning, beside controls.

    decodery train diffusion --out base --tasks copy,reverse,sort,replace-random,shuffle --letters 10 --steps 4000 \\
        --lr 2e-3
    python benchmarks/canvas_training.py base --work DIR --out benchmarks/results/canvas-training.json

Three models are trained from `base`, as long each: one distilled, one tuned, and as a control one on fresh examples
alone. All fill the same canvases by the same methods. Nothing is timed. Trainings go on where they stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import decodery
from decodery.models.loaders.store import terminal_progress
from decodery.training.dscd import SelfDistillationRecipe, distil
from decodery.training.llada_folder import MODEL
from decodery.training.r2 import R2Recipe, tune_r2
from decodery_benchmarks.diffusion.figures import totals
from decodery_benchmarks.diffusion.job import measure
from decodery_benchmarks.diffusion.settings import CanvasSettings
from decodery_benchmarks.results import write_result

TASKS, LETTERS = ("copy", "reverse", "sort", "replace-random", "shuffle"), 10
METHODS = ("static", "threshold:tau=0.9", "threshold:tau=0.7", "r2", "cad")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100, help="of each task")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    models = {"base": given.base} | {name: given.work / name for name in ("dscd", "r2", "control")}
    for name in ("dscd", "r2", "control"):
        if not (models[name] / MODEL).is_file():
            _train(name, given.base, models[name], given.steps)
    results: dict[str, Any] = {}
    for name, folder in models.items():
        lm = decodery.load(str(folder), dtype="float32", device="cpu")
        settings = CanvasSettings(str(folder), "float32", METHODS, TASKS, LETTERS, given.prompts)
        rows = measure(lm, settings)["rows"]
        for row in totals(rows):
            own = [each for each in rows if each["method"] == row["method"]]
            right = sum(each["right"] for each in own) / sum(each["prompts"] for each in own)
            results[f"{name}, {row['method']}"] = {
                "right": round(right, 3), "passes": row["passes"], "tokens per pass": row["tokens_per_pass"],
                **{task: row[task] for task in TASKS}, "distinct": row["distinct"],
            }  # fmt: skip
            print(name, row["method"], json.dumps(results[f"{name}, {row['method']}"]), flush=True)
    facts = {"prompts": given.prompts, "steps": given.steps, "letters": LETTERS, "seeds": 1}
    command = (
        f"python benchmarks/canvas_training.py base --work DIR --prompts {given.prompts} --steps {given.steps} "
        f"--out {given.out}"
    )
    write_result(given.out, {"command": command, "settings": facts, "rows": results})


def _train(name: str, base: Path, out: Path, steps: int) -> None:
    with terminal_progress() as progress:
        if name == "r2":
            tune_r2(base, R2Recipe(TASKS, LETTERS, steps=steps), out, progress=progress)
        else:
            distil(
                base,
                SelfDistillationRecipe(TASKS, LETTERS, steps=steps, control=name == "control"),
                out,
                progress=progress,
            )


if __name__ == "__main__":
    main()
