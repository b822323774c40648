"""What an hour of training makes of a model that wrote from left to right, filling canvases with lists of words.

    decodery train to-diffusion --out DIR --steps 1000
    python benchmarks/adaptation.py DIR --out benchmarks/results/adaptation.json

Beside it stands the model it was made of, which writes the same answers from left to right: shown nothing, and shown an
answer of each task. Nothing is timed; the training's own time is in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import decodery
from decodery.llm.llm import LLM
from decodery.training.to_diffusion import TASKS, Adaptation, WordTask, held_out
from decodery_benchmarks.results import write_result

METHODS = ("static", "static:block=1", "random", "threshold:tau=0.9", "threshold:tau=0.7", "factor", "local-leap", "r2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", default="smollm2", help="the model it was made of")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--minutes", type=float, required=True, help="of one core that its training took")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    asked = held_out(Adaptation(), given.count)
    results: dict[str, Any] = {}
    lm = decodery.load(str(given.folder), dtype="float32", device="cpu")
    for method in METHODS:
        results[method] = _filled(lm, method, asked)
        print(method, json.dumps(results[method]), flush=True)
    writer = decodery.load(given.of, dtype="float32", device="cpu")
    shown = "".join(f"{each.prompt}{each.answer}\n\n" for each in held_out(Adaptation(seed=1), len(TASKS)))
    for name, before in (("from left to right, shown nothing", ""), ("from left to right, shown three answers", shown)):
        texts = [
            writer.generate(before + each.prompt, apply_chat_template=False, max_new_tokens=12, stop=["\n"]).text
            for each in asked
        ]
        results[name] = _right(asked, texts)
        print(name, json.dumps(results[name]), flush=True)
    command = f"python benchmarks/adaptation.py DIR --count {given.count} --minutes {given.minutes:g} --out {given.out}"
    facts = {"prompts": given.count, "of": given.of, "minutes": given.minutes}
    write_result(given.out, {"command": command, "settings": facts, "rows": results})


def _filled(lm: LLM, method: str, asked: list[WordTask]) -> dict[str, float]:
    engine, places = lm.engine(), Adaptation().places
    begun = [
        lm.begin(engine, lm.fill(lm.encode(each.prompt, apply_chat_template=False), method, places)) for each in asked
    ]
    engine.run([each.work for each in begun])
    canvases = [each.canvas for each in begun]
    passes = sum(canvas.passes for canvas in canvases)
    tokens = sum(len(canvas.output) for canvas in canvases)
    return _right(asked, [each.output().text for each in begun]) | {
        "passes": round(passes / len(asked), 2),
        "tokens per pass": round(tokens / passes, 2),
    }


def _right(asked: list[WordTask], texts: list[str]) -> dict[str, float]:
    """Shares of texts that are right, of all and by task."""
    pairs = list(zip(asked, texts, strict=True))
    found = {"right": pairs} | {task: [pair for pair in pairs if pair[0].task == task] for task in TASKS}
    return {name: round(sum(each.right(text) for each, text in some) / len(some), 3) for name, some in found.items()}


if __name__ == "__main__":
    main()
