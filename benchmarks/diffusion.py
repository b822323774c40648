"""What ways of filling a canvas cost and get right, on the lists of a model of `decodery train diffusion`.

    python benchmarks/diffusion.py --model DIR --out benchmarks/results/diffusion.json

Nothing is timed: passes, rows fed to the model, and answers that are right. distinct: different answers of 20 draws at
temperature 1 to one shuffle, which falls where a method has collapsed the law.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

import decodery
from decodery.train.diffusion import Recipe, accuracy, held_out
from decodery.train.lists import CANVAS, Example, known

METHODS = (
    "static", "random", "static:steps=4", "threshold:tau=0.9", "threshold:tau=0.7", "factor", "local-leap", "r2", "cad",
    "ccd", "ccd:adaptive=true", "explore-exploit", "explore-exploit:branches=3", "freedave:drafts=2",
    "freedave:drafts=4", "dystruct:mean=8,least=4,most=8",
    "static:block=4", "static:block=4,cache=prefix", "static:block=4,cache=dual", "static:cache=dkv(refresh=1)",
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
    tasks = known(given.tasks.split(","))
    asked = held_out(Recipe(tasks), given.count)
    shuffle = next((" ".join(each.prompt) for each in asked if each.task == "shuffle"), None)
    results = {}
    for method in METHODS:
        results[method] = figures(lm, method, asked, shuffle)
        print(method, json.dumps(results[method]), flush=True)
    made = re.search(r"Made with `(.*?)`", (Path(given.model) / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    model = "" if made is None else re.sub(r"--out \S+", "--out DIR", " ".join(made[1].split()))
    facts = {"model": model, "tasks": tasks, "prompts": given.count, "places": CANVAS, "draws": DRAWS}
    command = f"python benchmarks/diffusion.py --model DIR --count {given.count} --out {given.out}"
    given.out.write_text(json.dumps({"command": command, "facts": facts, "results": results}, indent=1) + "\n")


def figures(lm: decodery.LM, method: str, asked: list[Example], shuffle: str | None) -> dict[str, float]:
    """What a method gets right and costs, per canvas."""
    outputs = lm.diffuse([" ".join(each.prompt) for each in asked], method, raw=True, max_new_tokens=CANVAS)
    assert isinstance(outputs, list)
    passes = sum(each.trace.passes for each in outputs)
    row = {task: round(share, 3) for task, share in accuracy([each.text.split() for each in outputs], asked).items()}
    row["passes"] = round(passes / len(outputs), 2)
    row["rows"] = round(sum(each.trace.rows for each in outputs) / len(outputs), 1)
    row["tokens_per_pass"] = round(sum(len(each.tokens) for each in outputs) / passes, 2)
    if shuffle is not None:
        drawn = lm.diffuse(shuffle, method, raw=True, max_new_tokens=CANVAS, temperature=1.0, n=DRAWS)
        assert isinstance(drawn, list)
        row["distinct"] = len({each.text for each in drawn})
    return row


if __name__ == "__main__":
    main()
