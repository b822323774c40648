"""What drafters bring by kind of text: `auto` with and without each adviser, and drafters named, at several settings.

    python benchmarks/draft/categories.py [SPEC ...] --model MODEL [--draft MODEL] [--questions 2] [--new 64]
        [--texts 1 4 16] [--temperatures 0 0.7] [--minutes 5] [--counted] [--kernels NAME] [--built-in] [--out FILE]

SPECs are drafters, by default `auto`, and `auto` with the draft model or with the shipped head. Kinds of text: those of
Spec-Bench, HumanEval (DECODERY_DATA), edits of code, JSON, calls of tools, and "agent loop": calls of two tools, each
after those before it, the first one after none (agents.py has loops with results). With --built-in the questions of
`decodery bench` take the place of Spec-Bench and HumanEval. Every drafter has a memory of its own, and kinds take
turns; plain decoding runs beside them. Of every kind: tokens per pass, and speed of decoding as plain seconds by its
own. Nothing begins after `minutes`.

Every `auto` is compared with the fastest drafter of each kind of text, which is not known before the text.

With --counted nothing is timed: a pass takes what the prior of its model says, by its rows, and a question to an
adviser its share of that, so that the same command counts the same on a busy machine. Plain decoding is counted, too.
Passes of draft models by themselves are not: name no drafters that need one. --kernels counts by the prices of a
machine that has these kernels, such as "AVX-512 VNNI" or AVX2. The column "questions" is their part of all seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from task_prompts import task_prompts

import decodery
from decodery.bench.workloads import questions
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.models.loaders.load import load
from decodery.step import prior_prices
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import RESULTS, write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
ROWS = 2048
PLACES = ("Lisbon", "Oslo", "Lima", "Kyoto", "Prague", "Hanoi", "Perth", "Vienna")


def prompts(count: int, built_in: bool) -> dict[str, list[str]]:
    """So many of every kind."""
    found: dict[str, list[str]] = defaultdict(list)
    if built_in:
        for question in questions("built-in"):
            found[question.category].append(question.turns[0])
    else:
        for line in (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            found[row["category"]].append(row["turns"][0])
        for line in (DATA / "humaneval_dev.jsonl").read_text("utf-8").splitlines():
            found["humaneval"].append(f"Complete this function:\n\n```python\n{json.loads(line)['prompt']}```")
    for kind, prompt in task_prompts(8 * count, 4712):
        if kind in ("edit", "json", "tools"):
            found[kind].append(prompt)
    done = ""
    for place in PLACES[:count]:
        found["agent loop"].append(
            "You have the tools get_weather(city) and save_note(title, text). Answer with one JSON call a line.\n"
            f"{done}Request: note the weather of {place}."
        )
        done += (
            f'Request: note the weather of {place}.\n{{"name": "get_weather", "arguments": {{"city": "{place}"}}}}\n'
            f'{{"name": "save_note", "arguments": {{"title": "Weather of {place}", "text": "sunny, 20 degrees"}}}}\n'
        )
    return {kind: texts[:count] for kind, texts in found.items()}


class Run:
    """What one drafter has done so far, at one setting.

    Args:
        counted: Whether seconds are counted by prices, and not measured.
    """

    def __init__(self, lm: LLM, drafter: Drafter | None, counted: bool) -> None:
        self.lm, self.drafter, self.memory = lm, drafter, Memory()
        self.sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        prices = prior_prices.prior_prices(lm.model)
        self.prices = (lambda context: prices.seconds(np.arange(ROWS), 1.0, context)) if counted else None

    def write(self, kind: str, texts: list[Any], new: int, temperature: float) -> list[list[int]]:
        engine = Engine(self.lm.model, memory=self.memory, pass_seconds=self.prices)
        requests = [
            self.lm.request_for(
                text,
                apply_chat_template=True,
                max_new_tokens=new,
                temperature=temperature,
                seed=1,
                drafter=self.drafter,
            )
            for text in texts
        ]
        sequences = [engine.submit(request) for request in requests]
        before = sum(each.taken for each in self._costs(sequences))
        # What follows is decoding alone.
        while not all(seq.finished or seq.generated for seq in sequences):
            engine.step()
        begin, read = perf_counter(), sum(len(seq.generated) for seq in sequences)
        engine.run(sequences)
        took, own = perf_counter() - begin, self.sums[kind]
        own["tokens"] += sum(len(seq.generated) for seq in sequences) - read
        for seq in sequences:
            steps = seq.trace.decoding
            own["passes"] += len(steps)
            own["rows"] += sum(step.rows for step in steps)
            if self.prices is not None:
                own["seconds"] += sum(float(self.prices(0)[step.rows]) for step in steps)
                own["plain"] += float(self.prices(0)[1]) * (len(seq.generated) - 1)
        questions = sum(each.taken for each in self._costs(sequences)) - before
        own["questions"] += questions
        own["seconds"] += took if self.prices is None else questions
        return [seq.generated for seq in sequences]

    def _costs(self, sequences: list[Any]) -> list[Any]:
        states = [seq.states.get(seq.request.drafter) for seq in sequences if seq.request.drafter is not None]
        found = {id(advice.costs): advice.costs for state in states if (advice := getattr(state, "advice", None))}
        return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft")
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--texts", type=int, nargs="+", default=[1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--counted", action="store_true")
    parser.add_argument("--kernels", choices=sorted(prior_prices._INTEGERS))
    parser.add_argument("--built-in", action="store_true")
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-categories.json")
    options = parser.parse_args()
    if options.kernels is not None:
        prior_prices.kernel_sets = lambda: (options.kernels,)
    begin, lm = monotonic(), decodery.load(options.model)
    drafters: dict[str, Drafter | None] = {} if options.counted else {"none": None}
    drafters["auto"] = resolve("drafter", "auto").bind(lm.model)
    if options.draft:
        drafters["auto with the draft"] = resolve("drafter", "auto", model=load(options.draft).model)
    elif not options.specs:
        drafters["auto with the head"] = resolve("drafter", "auto:head=shipped").bind(lm.model)
    drafters |= {spec: resolve("drafter", spec).bind(lm.model) for spec in options.specs}
    asked = prompts(options.questions, options.built_in)
    asked = {kind: texts for kind, texts in asked.items() if not options.kinds or kind in options.kinds}
    rows: dict[str, Any] = {}
    for temperature in options.temperatures:
        for together in options.texts:
            runs = {name: Run(lm, drafter, options.counted) for name, drafter in drafters.items()}
            different = 0
            for number in range(options.questions):
                for kind, texts in asked.items():
                    if number >= len(texts) or monotonic() - begin > 60 * options.minutes:
                        continue
                    batch = [texts[(number + each) % len(texts)] for each in range(together)]
                    written = {name: run.write(kind, batch, options.new, temperature) for name, run in runs.items()}
                    different += sum(each != next(iter(written.values())) for each in written.values())
            found = table(runs, f"{together} texts, temperature {temperature}", different)
            rows |= found | regrets(found)
    command = shlex.join(["python", "benchmarks/draft/categories.py", *sys.argv[1:]])
    write_result(options.out, {"command": command, "counted": options.counted, "rows": rows})


def table(runs: dict[str, Run], setting: str, different: int) -> dict[str, Any]:
    """Rows of the result, printed as they come."""
    found: dict[str, Any] = {}
    for name, run in runs.items():
        if name == "none":
            continue
        row: dict[str, Any] = {}
        every: dict[str, float] = defaultdict(float)
        for kind, own in run.sums.items():
            if "none" in runs:
                own["plain"] = runs["none"].sums[kind]["seconds"]
            row[kind] = figures(own)
            for part, value in own.items():
                every[part] += value
        row["all"] = figures(every)
        found[f"{name}, {setting}"] = {**row, "texts unlike the first": different}
        print(f"{name}, {setting}: {json.dumps(row)}; texts unlike the first: {different}", flush=True)
    return found


def figures(sums: dict[str, float]) -> dict[str, float]:
    """What is shown of a drafter's sums."""
    return {
        "speed": round(sums["plain"] / sums["seconds"], 3),
        "tokens per pass": round(sums["tokens"] / sums["passes"], 3),
        "rows per pass": round(sums["rows"] / sums["passes"], 2),
        "questions": round(sums["questions"] / sums["seconds"], 3),
    }


def regrets(found: dict[str, Any]) -> dict[str, Any]:
    """Of every `auto`, by kind of text, its speed by that of the fastest drafter there."""
    kinds = [kind for kind, row in next(iter(found.values())).items() if isinstance(row, dict)] if found else []
    best = {kind: max(row[kind]["speed"] for row in found.values()) for kind in kinds}
    return {
        f"{name}, by the best drafter of each kind": {
            kind: round(row[kind]["speed"] / best[kind], 3) for kind in kinds if best[kind]
        }
        for name, row in found.items()
        if name.startswith("auto")
    }


if __name__ == "__main__":
    main()
