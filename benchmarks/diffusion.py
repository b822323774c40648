"""What ways of filling a canvas cost and get right, on the lists of a model of `decodery train diffusion`.

    python benchmarks/diffusion.py --model DIR --out benchmarks/results/diffusion.json

Nothing is timed: passes, rows fed to the model, and answers that are right. distinct: different answers of 20 draws at
temperature 1 to one shuffle, which falls where a method has collapsed the law.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import decodery
from decodery.train.diffusion import Recipe, accuracy, held_out
from decodery.train.lists import CANVAS, TASKS

METHODS = (
    "static", "random", "static:steps=4", "threshold:tau=0.9", "threshold:tau=0.7", "factor", "local-leap", "r2", "cad",
    "ccd", "ccd:adaptive=true", "explore-exploit", "explore-exploit:branches=3", "freedave:drafts=2",
    "freedave:drafts=4", "dystruct:mean=8,least=4,most=8",
    "static:block=4,cache=prefix", "static:block=4,cache=dual", "static:cache=dkv(refresh=1)",
    "static:cache=dkv(refresh=2)", "static:cache=dkv(refresh=4)", "static:cache=dkv(refresh=4,delayed=false)",
    "static:cache=window(inner=4,outer=6,refresh=4)",
)  # fmt: skip
DRAWS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", default="copy,reverse,shuffle,replace")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = decodery.load(given.model, dtype="float32", device="cpu")
    tasks = tuple(given.tasks.split(","))
    assert set(tasks) <= set(TASKS)
    asked = held_out(Recipe(tasks), given.count)
    prompts = [" ".join(each.prompt) for each in asked]
    shuffle = next((prompt for prompt, each in zip(prompts, asked, strict=True) if each.task == "shuffle"), None)
    rows = []
    for method in METHODS:
        outputs = lm.diffuse(prompts, method, raw=True, max_new_tokens=CANVAS)
        assert isinstance(outputs, list)
        row = {"method": method, "accuracy": accuracy([each.text.split() for each in outputs], asked)}
        row["passes"] = sum(each.trace.passes for each in outputs) / len(outputs)
        row["rows"] = sum(each.trace.rows for each in outputs) / len(outputs)
        row["tokens_per_pass"] = sum(len(each.tokens) for each in outputs) / sum(each.trace.passes for each in outputs)
        if shuffle is not None:
            drawn = lm.diffuse(shuffle, method, raw=True, max_new_tokens=CANVAS, temperature=1.0, n=DRAWS)
            assert isinstance(drawn, list)
            row["distinct"] = len({each.text for each in drawn})
        rows.append(row)
        print(json.dumps(row), flush=True)
    facts = {"tasks": tasks, "prompts": given.count, "places": CANVAS, "draws": DRAWS}
    given.out.write_text(json.dumps({"facts": facts, "methods": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
