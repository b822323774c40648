"""JSON by a diffusion model: free, held from left to right, and held out of order.

    decodery train diffusion --out DIR --tasks json --steps 150 --batch 32
    python benchmarks/lave.py --model DIR --out benchmarks/results/lave.json
    decodery train diffusion --out S --tasks json --letters 8 --size s --steps 500 --lr 1.5e-3
    python benchmarks/lave.py --model S --letters 8 --out benchmarks/results/lave-s.json

Nothing is timed. valid: texts that the schema allows; right: the pairs that were asked for. left to right is blocks of
one place, where a constraint needs to know nothing of holes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import decodery
from decodery.diffusion.texts import Filling
from decodery.training.diffusion import DiffusionRecipe, held_out
from decodery.training.lists import MOST, VOCABULARY
from decodery_benchmarks.results import write_result

SCHEMA = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
WAYS = (
    ("static", False), ("threshold:tau=0.5", False), ("static:block=1", True), ("static", True),
    ("threshold:tau=0.5", True), ("static:steps=2", False), ("static:steps=2", True), ("random", False),
    ("random", True), ("lave:policy=random,top=1,others=0", True),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--letters", type=int, default=MOST, help="that the model was trained on")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm, recipe = decodery.load(given.model, dtype="float32", device="cpu"), DiffusionRecipe(("json",), given.letters)
    asked = held_out(recipe, given.count)
    results = {}
    for method, is_held in WAYS:
        constraint = decodery.constraints.JSONSchema(SCHEMA) if is_held else None
        fill = lm.fill([], method, recipe.canvas, temperature=0.5, constraint=constraint)
        engine = lm.engine()
        fillings = []
        for seed, each in enumerate(asked):
            fill.prompt, fill.seed = lm.encode(" ".join(each.prompt), apply_chat_template=False), seed
            fillings.append(lm.begin(engine, fill))
        engine.run([each.work for each in fillings])
        name = f"{method}, {'held' if is_held else 'free'}"
        results[name] = figures(fillings, [each.right for each in asked])
        print(name, json.dumps(results[name]), flush=True)
    facts = {"prompts": given.count, "places": recipe.canvas, "schema": SCHEMA, "temperature": 0.5}
    letters = "" if given.letters == MOST else f" --letters {given.letters}"
    command = f"python benchmarks/lave.py --model DIR{letters} --count {given.count} --out {given.out}"
    write_result(given.out, {"command": command, "settings": facts, "rows": results})


def figures(fillings: list[Filling], right: list[Any]) -> dict[str, float]:
    """Shares of texts, and passes and looks of a canvas."""
    count, outputs = len(fillings), [each.output() for each in fillings]
    found = {
        "valid": sum(_valid(each.text) for each in outputs) / count,
        "right": sum(
            judge([VOCABULARY[token] for token in each.tokens if token != each.stopped_by])
            for judge, each in zip(right, outputs, strict=True)
        ) / count,
        "passes": sum(each.canvas.passes for each in fillings) / count,
    }  # fmt: skip
    checks = [each.canvas.checks for each in fillings if each.canvas.checks is not None]
    if checks:
        found |= {
            "refused": sum(each.refused for each in checks) / sum(each.tried for each in checks),
            "known": sum(each.known for each in checks) / sum(each.tried for each in checks),
            "recovered": sum(each.recovered for each in checks) / count,
            "asked": sum(each.asked for each in checks) / sum(len(each.tokens) for each in outputs),
        }
    return {name: round(value, 3) for name, value in found.items()}


def _valid(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and bool(found) and all(isinstance(each, int) for each in found.values())


if __name__ == "__main__":
    main()
