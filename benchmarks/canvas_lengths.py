"""Canvases much longer than their answers: what windows, cuts and growing canvases save there, and lose.

    decodery train diffusion --out DIR --tasks json,copy,expr --letters 12 --places 64 --steps 2000 --batch 32 --lr 2e-3
    python benchmarks/canvas_lengths.py DIR --work DIR --out benchmarks/results/canvas-lengths.json

DIR is a model that was trained on canvases of all lengths; sums in brackets it does not learn in so many steps, and the
page leaves out what static decoding gets wrong. FILTER is a filter for learn2pd, trained here on its own decoding.
Nothing is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import decodery
from decodery.bench.metrics import wilson
from decodery.llm.llm import LLM
from decodery.training.learn2pd import fit_filter, labelled
from decodery_benchmarks.diffusion.job import kendall
from decodery_benchmarks.diffusion.tasks import Item, drawn
from decodery_benchmarks.experiment import Experiment
from decodery_benchmarks.results import begun_result

TASKS = ("json", "copy", "expr")
LENGTHS = (32, 48, 64)
FILTERED = 16
"""Places of the filter's blocks."""
WAYS = (
    "static", "threshold:tau=0.9", "threshold:tau=0.9,block=16", "static:cache=window(inner=4,outer=16,refresh=8)",
    "threshold:tau=0.9,cache=window(inner=4,outer=16,refresh=8)", "threshold:tau=0.9,block=16,cache=dual",
    "learn2pd:filter=FILTER,block=16,cut=never", "learn2pd:filter=FILTER,block=16,cut=filter",
    "learn2pd:filter=FILTER,block=16,cut=any", "learn2pd:filter=FILTER,block=16,cut=any,floor=0.9",
    "dystruct:mean=16,least=8,most=32", "dystruct:mean=16,least=8,most=32,weld=0",
    "dystruct:mean=8,least=8,most=8,alpha=0,weld=0",
)  # fmt: skip
"""The last one is the simple rule beside dystruct: eight places more until an end is written."""
_TOGETHER = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--work", type=Path, required=True, help="where the filter is kept")
    parser.add_argument("--letters", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=50, help="of each task")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lm = decodery.load(given.folder, dtype="float32", device="cpu")
    facts = begun_result(given.out)["settings"] or {
        "prompts": given.prompts, "letters": given.letters, "filter": trained(lm, given.letters, given.work / "filter"),
    }  # fmt: skip
    settings = f"--letters {given.letters} --prompts {given.prompts}"
    command = f"python benchmarks/canvas_lengths.py DIR --work DIR {settings} --out {given.out}"
    items = drawn(TASKS, given.prompts, given.letters, 0)

    def run(places: int, way: str) -> list[dict[str, Any]]:
        return measured(lm, way, way.replace("FILTER", str(given.work / "filter")), places, items)

    Experiment({"places": LENGTHS, "way": WAYS}, run, settings=facts).measure(given.out, command)


def trained(lm: LLM, letters: int, path: Path) -> dict[str, float]:
    """What a filter made of prompts that are not asked later says of itself."""
    prompts = [lm.encode(item.prompt, apply_chat_template=False) for item in drawn(TASKS, 60, letters, 1)]
    found = labelled(lm.engine(), lm.model, prompts, LENGTHS[0], FILTERED, eos_ids=lm.tokenizer.eos_ids)
    learned, figures = fit_filter(found, model=lm.model.fingerprint, epochs=1500)
    path.parent.mkdir(parents=True, exist_ok=True)
    learned.save(path, prompts=len(prompts), places=FILTERED)
    figures["least passes"] = found.passes / found.static
    return {name: round(value, 4) for name, value in figures.items()}


def measured(lm: LLM, way: str, spec: str, places: int, items: list[Item]) -> list[dict[str, Any]]:
    """A row for each task. tokens: of an output, its end with it."""
    runs: dict[str, list[Any]] = {task: [] for task in TASKS}
    for first in range(0, len(items), _TOGETHER):
        some, engine = items[first : first + _TOGETHER], lm.engine()
        begun = [
            lm.begin(engine, lm.fill(lm.encode(each.prompt, apply_chat_template=False), spec, places)) for each in some
        ]
        engine.run([each.work for each in begun])
        for item, each in zip(some, begun, strict=True):
            runs[item.task].append((item.right(each.output()), each.canvas))
    rows = []
    for task, own in runs.items():
        right, canvases = sum(good for good, _ in own), [canvas for _, canvas in own]
        low, high = wilson(right, len(own))

        def mean(values: list[float]) -> float:
            return round(float(np.mean(values)), 3)

        rows.append({
            "way": way, "places": places, "task": task, "prompts": len(own), "right": right, "low": round(low, 4),
            "high": round(high, 4), "passes": mean([canvas.passes for canvas in canvases]),
            "rows": mean([canvas.rows for canvas in canvases]), "pairs": mean([canvas.pairs for canvas in canvases]),
            "tokens": mean([len(canvas.output) for canvas in canvases]),
            "tau": mean([kendall(canvas) for canvas in canvases]),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
