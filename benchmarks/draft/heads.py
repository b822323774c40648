"""What draft heads bring the embedded model beside drafts that need none, all on the same prompts.

    python benchmarks/draft/heads.py [SPEC ...] [--questions 26] [--new 64] [--nodes 16] [--batch 1] [--temperature 0]
        [--rounds 2]

SPECs are drafters with their settings, as `eagle-3` or `hydra:head=FOLDER`; without any, the head that comes along
alone, auto with and without it, prompt-lookup and suffix-tree. Prompts are questions of Spec-Bench (DECODERY_DATA), as
many of every category; methods take turns on each. Trees have at most `nodes` nodes. Of every method: tokens per pass;
step, the part of a step that is not the pass, in units of a plain step; speed, plain seconds by its own, of the same
questions, over all rounds; bytes of the head; texts that are plain decoding's. Adds what it finds to
benchmarks/results/draft-heads.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import decodery
from decodery.core.memory import Memory
from decodery.draft.base import Drafter
from decodery.model.drafts import HEAD
from decodery.registry import resolve

RESULTS = Path(__file__).parents[1] / "results"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
USUAL = (HEAD, "auto:head=shipped", "auto", "prompt-lookup", "suffix-tree")


def questions(count: int) -> list[dict[str, Any]]:
    """As many of every category, in turns."""
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines():
        question = json.loads(line)
        by_category[question["category"]].append(question)
    turns = [group[turn] for turn in range(count) for group in by_category.values() if turn < len(group)]
    return turns[:count]


def size(drafter: Drafter, model: Any) -> int:
    """Bytes of a head's tensors; 0 for drafters without one."""
    trained = getattr(drafter.suited(model), "trained", None)
    return 0 if trained is None else sum(each.nbytes for each in trained.tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=USUAL)
    parser.add_argument("--questions", type=int, default=26)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-heads.json")
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    drafters = {"none": None, **{spec: resolve("draft", spec) for spec in options.specs}}
    asked = questions(options.questions)
    groups = [asked[first : first + options.batch] for first in range(0, len(asked), options.batch)]
    sums: dict[str, dict[str, dict[str, float]]] = {name: defaultdict(lambda: defaultdict(float)) for name in drafters}

    memories: dict[str, Memory] = {}

    def run(name: str, group: list[dict[str, Any]]) -> list[list[int]]:
        # What one method remembers is no other one's.
        lm.memory = memories[name]
        outputs = lm.generate(
            [question["turns"][0] for question in group],
            max_new_tokens=options.new,
            temperature=options.temperature,
            seed=1,
            drafter=drafters[name],
            max_nodes=options.nodes,
        )
        for question, output in zip(group, outputs, strict=True):
            for part in (question["category"], "all"):
                found = sums[name][part]
                for step in output.trace.decoding:
                    # Of a pass that texts share, each has its part.
                    found["seconds"] += step.seconds / step.sequences
                    found["scoring"] += step.score / step.sequences
                    found["passes"] += 1
                    found["tokens"] += step.emitted
                    found["rows"] += step.rows
        return [output.tokens for output in outputs]

    same = dict.fromkeys(drafters, 0)
    for turn in range(options.rounds):
        memories |= {name: Memory() for name in drafters}
        for number, group in enumerate(groups):
            # Who is first has the caches cold.
            order = list(drafters)[number % len(drafters) :] + list(drafters)[: number % len(drafters)]
            texts = {name: run(name, group) for name in order}
            for name in drafters:
                same[name] += sum(a == b for a, b in zip(texts[name], texts["none"], strict=True))
        print(f"round {turn + 1}", flush=True)
    step = sums["none"]["all"]["seconds"] / sums["none"]["all"]["passes"]
    result: dict[str, Any] = {}
    for name, drafter in drafters.items():
        whole = sums[name]["all"]
        result[name] = {
            "tokens_per_pass": round(whole["tokens"] / whole["passes"], 3),
            "rows_per_pass": round(whole["rows"] / whole["passes"], 2),
            "step": round((whole["seconds"] - whole["scoring"]) / whole["passes"] / step, 4),
            "speed": {
                part: round(
                    (sums["none"][part]["seconds"] / sums["none"][part]["tokens"]) * found["tokens"] / found["seconds"],
                    3,
                )
                for part, found in sums[name].items()
            },
            "bytes": 0 if drafter is None else size(drafter, lm.model),
            "texts_as_plain": round(same[name] / (len(asked) * options.rounds), 4),
        }
    settings = {
        name: getattr(options, name) for name in ("questions", "new", "nodes", "batch", "temperature", "rounds")
    }
    known = json.loads(options.out.read_text("utf-8"))["runs"] if options.out.is_file() else []
    known = [each for each in known if each["settings"] != settings or set(each["methods"]) != set(result)]
    given = " ".join(f"--{name} {value}" for name, value in settings.items())
    command = f"python benchmarks/draft/heads.py {shlex.join(options.specs)} {given}"
    known.append({"command": command, "settings": settings, "methods": result})
    options.out.write_text(json.dumps({"runs": known}, indent=1) + "\n", "utf-8")
    for name, found in result.items():
        print(name, json.dumps(found))


if __name__ == "__main__":
    main()
