"""What `auto:keep=FOLDER` brings to a process that begins: on texts that were written before, and on new ones.

    python benchmarks/draft/kept.py [--model smollm2] [--questions 4] [--new 96] [--kinds KIND ...] [--times 1 4]

One process writes answers to prompts of every kind (see categories.py) and keeps what it learned. Then two processes
begin, one with the folder and one without, and write the answers to the same prompts and to others of the same kinds.
--times says how many such sets of prompts were written before. At temperature 0.7 an answer that was written before
comes again in part only; greedy texts stand beside them. Nothing is timed: a pass takes what the prior of its model
says, by its rows, so that the command counts the same on a busy machine. Writes benchmarks/results/draft-kept.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from categories import Run
from task_prompts import KINDS, task_prompts

import decodery
from decodery.llm.llm import LLM
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.stores.kept import keep_all

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import RESULTS, write_result

OTHERS = 4713


def process(lm: LLM, folder: str | None, asked: dict[str, list[str]], new: int, temperature: float) -> dict[str, Any]:
    """What a process that begins counts by kind, one text at a time; what it learns is kept where it has a folder."""
    run = Run(lm, Auto(keep=folder).bind(lm.model), counted=True)
    for kind, texts in asked.items():
        for text in texts:
            run.write(kind, [text], new, temperature)
    keep_all()
    sums = run.sums
    every = {part: sum(own[part] for own in sums.values()) for part in ("tokens", "passes", "plain", "seconds")}
    return {
        kind: {
            "tokens per pass": round(own["tokens"] / own["passes"], 3),
            "speed": round(own["plain"] / own["seconds"], 3),
        }
        for kind, own in (*sums.items(), ("all", every))
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--times", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-kept.json")
    options = parser.parse_args()
    lm = decodery.load(options.model)

    def prompts(first: int, last: int) -> dict[str, list[str]]:
        found = task_prompts(len(KINDS) * last, OTHERS)
        return {kind: [text for each, text in found if each == kind][first:last] for kind in options.kinds}

    count, rows = options.questions, {}
    for times in options.times:
        with TemporaryDirectory() as folder:
            for number in range(times):
                process(lm, folder, prompts(number * count, (number + 1) * count), options.new, 0.0)
            learned = sum(each.stat().st_size for each in Path(folder).iterdir() if each.is_file())
            last = max(options.times)
            for name, asked, temperature in (
                ("seen before, greedy", prompts(0, count), 0.0),
                ("seen before, temperature 0.7", prompts(0, count), 0.7),
                ("new", prompts(last * count, (last + 1) * count), 0.0),
            ):
                for kind in ("kept", "cold"):
                    # What is measured first is not learned by what is measured next.
                    with TemporaryDirectory() as own:
                        place = str(copytree(folder, own, dirs_exist_ok=True)) if kind == "kept" else None
                        row = process(lm, place, asked, options.new, temperature)
                    rows[f"{name}, {kind}, {times} sets before"] = {**row, "bytes": learned}
                    print(f"{name}, {kind}, {times} sets before: {row['all']}", flush=True)
    command = " ".join(["python benchmarks/draft/kept.py", *sys.argv[1:]])
    write_result(options.out, {"command": command, "counted": True, "rows": rows})


if __name__ == "__main__":
    main()
