"""What draft heads bring the embedded model beside drafts that need none, all on the same prompts.

    python benchmarks/draft/heads.py [SPEC ...] [--questions 26] [--longest 0] [--new 64] [--nodes 16] [--batch 1]
        [--temperature 0] [--rounds 2] [--work DIR]

SPECs are drafters with their settings, as `eagle-3` or `hydra:head=FOLDER`; without any, the head that comes along
alone, auto with and without it, prompt-lookup and suffix-tree. Prompts are questions of Spec-Bench (DECODERY_DATA), as
many of every category, of at most `longest` characters where that is not 0; methods take turns on each. Trees have at
most `nodes` nodes. Of every method: tokens per pass; step, the part of a step that is not the pass, in units of a plain
step; draft, what is proposed before a pass by the tokens drafted, in units of a plain pass; speed, plain seconds by its
own, of the same questions, over all rounds; bytes of the head; texts that are plain decoding's. Adds what it finds to
benchmarks/results/draft-heads.json.

With --work: what `small_heads.py` has made in that folder, beside the SPECs, or without any what comes along; their
processor seconds of training as well. What is measured is kept there question by question, so that the same command
goes on where it was stopped. Adds what it finds to benchmarks/results/draft-small-heads.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from small_heads import SECONDS, ready, spec

import decodery
from decodery.core.registry import resolve
from decodery.models.loaders.drafts import HEAD
from decodery.models.loaders.store import replacing
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parents[1] / "results"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
USUAL = (HEAD, "auto:head=shipped", "auto", "prompt-lookup", "suffix-tree")
FREE = (
    f"{HEAD}:tree_policy=none,length=3",
    "ppd:length=8",
    "hidden-transfer:length=8",
    "del:layers=4/12/20/26,length=6",
)
"""What is measured beside what was trained in a folder: parts that come along, and what needs none."""
Sums = dict[str, dict[str, dict[str, float]]]
"""By method and category: seconds, tokens and rows so far."""


def questions(count: int, longest: int) -> list[dict[str, Any]]:
    """As many of every category, in turns."""
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines():
        question = json.loads(line)
        if longest and len(question["turns"][0]) > longest:
            continue
        by_category[question["category"]].append(question)
    turns = [group[turn] for turn in range(count) for group in by_category.values() if turn < len(group)]
    return turns[:count]


def size(drafter: Drafter, model: Any) -> int:
    """Bytes of a head's tensors; 0 for drafters without one."""
    trained = getattr(drafter.bind(model), "trained", None)
    return 0 if trained is None else sum(each.nbytes for each in trained.tensors.values())


class Unfinished:
    """What was measured of a run so far, in a file that the end of the run removes; None keeps nothing."""

    def __init__(self, path: Path | None, made: dict[str, Any]) -> None:
        self.path, self.made = path, made

    def restore(self, sums: Sums, same: dict[str, int]) -> int:
        """How many groups of questions are done."""
        if self.path is None or not self.path.is_file():
            return 0
        found = json.loads(self.path.read_text("utf-8"))
        if found["made"] != json.loads(json.dumps(self.made)):
            raise SystemExit(f"{self.path} belongs to another command: repeat that, or remove the file")
        same.update(found["same"])
        for name, parts in found["sums"].items():
            for part, values in parts.items():
                sums[name][part].update(values)
        return int(found["done"])

    def keep(self, sums: Sums, same: dict[str, int], done: int) -> None:
        if self.path is not None:
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps({"made": self.made, "sums": sums, "same": same, "done": done}), "utf-8")

    def end(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--questions", type=int, default=26)
    parser.add_argument("--longest", type=int, default=0)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    work: Path | None = options.work
    lm = decodery.load("smollm2")
    named = {each: each for each in options.specs or (FREE if work else USUAL)}
    # A folder is this machine's business.
    named |= {} if work is None else {spec(Path("work"), name): spec(work, name) for name in ready(work)}
    drafters = {"none": None, **{name: resolve("drafter", each) for name, each in named.items()}}
    asked = questions(options.questions, options.longest)
    groups = [asked[first : first + options.batch] for first in range(0, len(asked), options.batch)]
    sums: Sums = {name: defaultdict(lambda: defaultdict(float)) for name in drafters}
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
            max_draft_tokens=options.nodes,
        )
        for question, output in zip(group, outputs, strict=True):
            for part in (question["category"], "all"):
                found = sums[name][part]
                for step in output.trace.decoding:
                    # Of a pass that texts share, each has its part.
                    found["seconds"] += step.seconds / step.sequences
                    found["scoring"] += step.score / step.sequences
                    found["proposing"] += step.propose / step.sequences
                    found["drafted"] += step.nodes
                    found["passes"] += 1
                    found["tokens"] += step.emitted
                    found["rows"] += step.rows
        return [output.tokens for output in outputs]

    settings = {
        name: getattr(options, name)
        for name in ("questions", "longest", "new", "nodes", "batch", "temperature", "rounds")
    }
    same = dict.fromkeys(drafters, 0)
    unfinished = Unfinished(work and work / "measured.json", {"settings": settings, "methods": list(drafters)})
    done = unfinished.restore(sums, same)
    for drafter in drafters.values():
        # What is packed or compiled once is no part of a step.
        lm.generate("Hello", max_new_tokens=8, drafter=drafter, max_draft_tokens=options.nodes)
    memories |= {name: Memory() for name in drafters}
    for at in range(done, options.rounds * len(groups)):
        number, group = at % len(groups), groups[at % len(groups)]
        if number == 0:
            memories |= {name: Memory() for name in drafters}
        # Who is first has the caches cold.
        order = list(drafters)[number % len(drafters) :] + list(drafters)[: number % len(drafters)]
        texts = {name: run(name, group) for name in order}
        for name in drafters:
            same[name] += sum(a == b for a, b in zip(texts[name], texts["none"], strict=True))
        unfinished.keep(sums, same, at + 1)
        print(f"{at + 1} of {options.rounds * len(groups)}", flush=True)
    plain = sums["none"]["all"]
    step, alone = plain["seconds"] / plain["passes"], plain["scoring"] / plain["passes"]
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
        # Inside of the target's own pass nothing is proposed before it.
        if whole["drafted"] and not name.startswith(("ppd", "hidden-transfer")):
            result[name]["draft"] = round(whole["proposing"] / whole["drafted"] / alone, 4)
    out = RESULTS / ("draft-heads.json" if work is None else "draft-small-heads.json")
    known = list(begun_result(out)["rows"])
    known = [
        each for each in known if {"longest": 0, **each["settings"]} != settings or set(each["methods"]) != set(result)
    ]
    given = " ".join(f"--{name} {value}" for name, value in settings.items()) + (" --work work" if work else "")
    command = f"python benchmarks/draft/heads.py {shlex.join([*options.specs, *shlex.split(given)])}"
    run_facts: dict[str, Any] = {"command": command, "settings": settings, "methods": result}
    if work is not None:
        run_facts["seconds of training"] = {
            spec(Path("work"), name): round(json.loads((work / name / SECONDS).read_text("utf-8")), 1)
            for name in ready(work)
        }
    known.append(run_facts)
    unfinished.end()
    write_result(out, {"rows": known})
    for name, found in result.items():
        print(name, json.dumps(found))


if __name__ == "__main__":
    main()
