"""What learned parts of a diffusion model bring: CD4LM's distillation, R2's tuning, Learn2PD's filter, and controls.

    decodery train diffusion --out base --tasks copy,replace-random,shuffle --letters 5 --steps 1500 --batch 32 \\
        --lr 2e-3
    python benchmarks/canvas_training.py base --work DIR --out benchmarks/results/canvas-training.json

From `base` models are trained, as long each and with several seeds: distilled, tuned, and as a control on fresh
examples alone. Filters learn how `base` decodes, as a control with labels that were shuffled. All fill the same
canvases, whose prompts nothing was trained on. Nothing is timed. Trainings go on where they stopped.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import decodery
from decodery.models.loaders.store import terminal_progress
from decodery.training.diffusion_tuning import DiffusionModel
from decodery.training.dscd import SelfDistillationRecipe, distil
from decodery.training.kind import Run
from decodery.training.learn2pd import fit_filter, labelled
from decodery.training.llada_folder import MODEL
from decodery.training.r2 import R2Recipe, tune_r2
from decodery_benchmarks.diffusion.figures import totals
from decodery_benchmarks.diffusion.job import measure
from decodery_benchmarks.diffusion.settings import CanvasSettings
from decodery_benchmarks.diffusion.tasks import drawn, room
from decodery_benchmarks.experiment import Experiment

TASKS, LETTERS = ("copy", "replace-random", "shuffle"), 5
METHODS = ("static", "threshold:tau=0.9", "threshold:tau=0.7", "r2", "cad")


BLOCK, FILTERED = 7, 300
"""Positions of a filter's block, and prompts that it learns from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100, help="of each task")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(given.seeds)
    facts = {"prompts": given.prompts, "steps": given.steps, "letters": LETTERS, "seeds": given.seeds}
    command = (
        f"python benchmarks/canvas_training.py base --work DIR --prompts {given.prompts} --steps {given.steps} "
        f"--seeds {given.seeds} --out {given.out}"
    )

    def run(part: str, seed: int) -> list[dict[str, Any]]:
        folder, methods = given.base, METHODS
        if part.startswith("filter"):
            out = given.work / f"{part}-{seed}.safetensors".replace(" ", "-")
            if not out.is_file():
                _filter(given.base, out, seed, shuffled=part != "filter")
            methods = (f"learn2pd:filter={out},block={BLOCK}",)
        elif part != "base":
            folder = given.work / f"{part}-{seed}"
            if not (folder / MODEL).is_file():
                _train(part, given.base, folder, given.steps, seed)
        lm = decodery.load(str(folder), dtype="float32", device="cpu")
        rows = measure(lm, CanvasSettings(str(folder), "float32", methods, TASKS, LETTERS, given.prompts))["rows"]
        return [_row(rows, method) for method in methods]

    grid = [{"part": "base", "seed": 0}]
    parts = ("control", "dscd", "r2", "filter shuffled", "filter")
    grid += [{"part": part, "seed": seed} for seed in seeds for part in parts]
    Experiment(grid, run, settings=facts).measure(given.out, command)


def _row(rows: list[dict[str, Any]], method: str) -> dict[str, Any]:
    own = [each for each in rows if each["method"] == method]
    (total,) = (each for each in totals(rows) if each["method"] == method)
    return {
        "method": method.split(":filter")[0],
        "right": round(sum(each["right"] for each in own) / sum(each["prompts"] for each in own), 4),
        "passes": total["passes"], "tokens per pass": total["tokens_per_pass"],
        **{task: total[task] for task in TASKS}, "distinct": total["distinct"],
    }  # fmt: skip


def _train(part: str, base: Path, out: Path, steps: int, seed: int) -> None:
    with terminal_progress() as progress:
        if part == "r2":
            tuning = R2Recipe(TASKS, LETTERS, steps=steps, seed=seed)
            tune_r2(Run("", out, (DiffusionModel(base), tuning), progress))
        else:
            recipe = SelfDistillationRecipe(TASKS, LETTERS, steps=steps, control=part == "control", seed=seed)
            distil(Run("", out, (DiffusionModel(base), recipe), progress))


def _filter(base: Path, out: Path, seed: int, *, shuffled: bool) -> None:
    """A filter of how `base` decodes; shuffled: with labels of other positions."""
    lm = decodery.load(str(base), dtype="float32", device="cpu")
    asked = [
        lm.encode(each.prompt, apply_chat_template=False) for each in drawn(TASKS, FILTERED // 5, LETTERS, seed + 1)
    ]
    found = labelled(lm.engine(), lm.model, asked, room(lm, TASKS, LETTERS), BLOCK, eos_ids=lm.tokenizer.eos_ids)
    if shuffled:
        labels = found.final.clone()
        known = labels[found.open]
        labels[found.open] = known[torch.randperm(len(known), generator=torch.Generator("cpu").manual_seed(seed))]
        found = replace(found, final=labels)
    fit_filter(found, model=lm.model.fingerprint, seed=seed)[0].save(out)


if __name__ == "__main__":
    main()
