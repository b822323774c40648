"""What tests are worth as scorers of programs: HumanEval, the embedded model, the examples of a docstring as its tests.

    python benchmarks/search_programs.py [--problems 25] [--work DIR] [--out benchmarks/results]

Of the HumanEval problems (DECODERY_DATA) those are taken whose docstring has two examples or more that Python reads as
such. Searches see these examples alone, as the scorer program-tests; whether what they return is right is told by the
problem's own tests, which no search sees. The model is asked by chat and its answer begun with the function's head,
which it goes on from; `iad` asks anew, and an answer to that is a whole program. A pool of samples is drawn, from which
choosing is computed at every width, and other searches are run. Programs run in the sandbox; nothing is timed.
Everything is kept in --work; the next call goes on from there, and search-programs.json holds all problems of which
everything is known.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from doctest import DocTestParser
from pathlib import Path
from typing import Any

import numpy as np

import decodery as dc
from decodery.scorers import LogProbability, ProgramTests
from decodery.scorers.sandbox import Sandbox
from decodery.search import IAD, PGTD, AdaptiveSampling, BestOfN
from decodery.search.base import Search
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.results import write_result
from decodery_benchmarks.searches.pools import Sampling, estimated

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
RESULTS = Path(__file__).parent / "results"
EXAMPLES = 2
POOL, TOKENS, TEMPERATURE, TOGETHER = 8, 120, 0.6, 5
"""Texts of a pool, tokens of a text, and problems that share their passes."""
BUDGETS = (1, 2, 4, 8)
STOP = ("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\nassert", "\nimport", "\nfrom", "\n>>>", "\n```")
POOLED = (("pass@n", ""), ("best-of-n", "tests"), ("best-of-n", "likelihood"))
BOX = Sandbox(seconds=3.0)


@dataclass(frozen=True)
class Problem:
    """head: signature and docstring, to be continued. shown: its examples, as tests. hidden, name: the tests' function
    `check`, and what it is given."""

    number: int
    task: str
    head: str
    shown: tuple[str, ...]
    hidden: str
    name: str

    @property
    def examples(self) -> ProgramTests:
        return ProgramTests(tests=self.shown, head=self.head, sandbox=BOX)

    def right(self, text: str) -> bool:
        """Whether a text passes the tests that no search sees."""
        tests = ProgramTests(tests=(f"check({self.name})",), setup=self.hidden, head=self.head, sandbox=BOX)
        return tests.verdict(text).share == 1

    @property
    def chat(self) -> str:
        return f"Complete this Python function. Answer with one code block.\n\n```python\n{self.head}\n```"


def problems() -> list[Problem]:
    """Those whose docstring has examples enough."""
    found = []
    lines = (DATA / "humaneval_dev.jsonl").read_text("utf-8").splitlines()
    for number, entry in enumerate(map(json.loads, lines)):
        shown = tuple(_examples(entry["prompt"], entry["entry_point"]))
        if len(shown) >= EXAMPLES:
            name, task = entry["entry_point"], entry["task_id"]
            found.append(Problem(number, task, entry["prompt"].rstrip(), shown, entry["test"], name))
    return found


def _examples(head: str, name: str) -> Iterator[str]:
    """The examples of a function's docstring as asserts; what is no expression on both sides is left out."""
    functions = [each for each in ast.parse(f"{head}    pass").body if isinstance(each, ast.FunctionDef)]
    said = next(ast.get_docstring(each) for each in functions if each.name == name) or ""
    for example in DocTestParser().get_examples(said):
        sides = example.source.strip(), example.want.strip()
        try:
            for side in sides:
                ast.parse(side, mode="eval")
        except SyntaxError:
            continue
        yield f"assert ({sides[0]}) == ({sides[1]})"


RUNS: dict[str, tuple[Callable[[Problem], Search], float, bool]] = {
    "greedy": (lambda problem: BestOfN(scorer=problem.examples, n=1), 0.0, False),
    "adaptive-sampling(n=8,threshold=1,width=2)": (
        lambda problem: AdaptiveSampling(scorer=problem.examples, n=POOL, threshold=1.0, width=2),
        TEMPERATURE,
        False,
    ),
    "pg-td(budget=8)": (lambda problem: PGTD(problem.examples, budget=POOL), 0.0, False),
    "iad(n=4,rounds=1,feedback=none)": (
        lambda problem: IAD(scorer=problem.examples, n=4, rounds=1, feedback="none"),
        TEMPERATURE,
        True,
    ),
    "iad(n=4,rounds=1)": (lambda problem: IAD(scorer=problem.examples, n=4, rounds=1), TEMPERATURE, True),
}
"""By name: the search for a problem, its temperature, and whether the model is asked by chat."""


class Bench:
    """The model, and what was drawn so far: `traces`, a line each in a file of the folder `work`."""

    def __init__(self, work: Path) -> None:
        self.path = work / "traces.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text("utf-8").splitlines() if self.path.is_file() else []
        self.traces: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.lm = dc.load("smollm2")

    def keep(self, trace: dict[str, Any]) -> None:
        self.traces.append(trace)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trace) + "\n")

    def known(self, kind: str) -> dict[int, dict[str, Any]]:
        return {trace["problem"]: trace for trace in self.traces if trace["kind"] == kind}

    def missing(self, kind: str, asked: Sequence[Problem]) -> list[Problem]:
        known = self.known(kind)
        return [problem for problem in asked if problem.number not in known]

    def search(
        self, searches: Sequence[Search], asked: Sequence[Problem], temperature: float, chat: bool = False
    ) -> list[list[dc.Output]]:
        """What each search finds for its problem; they share their passes. chat: answers are whole programs."""
        engine, jobs = self.lm.engine(), []
        for problem, search in zip(asked, searches, strict=True):
            settings: dict[str, Any] = {"temperature": temperature, "max_new_tokens": TOKENS, "drafter": None}
            settings["seed"] = problem.number << 20
            if chat:
                request = self.lm.request_for(problem.chat, **settings)
            else:
                begun = self.lm.tokenizer.encode(f"```python\n{problem.head}", special=False)
                request = self.lm.request([*self.lm.encode(problem.chat), *begun], stop=STOP, **settings)
            jobs.append(engine.enter(search.bind(self.lm.tokenizer).find(engine, request)))
        engine.run(jobs)
        return [[self.lm.output(seq) for seq in job.result or ()] for job in jobs]

    def draw(self, asked: Sequence[Problem]) -> None:
        """Pools of these problems, kept as traces."""
        searches = [
            Sampling(POOL, {"tests": problem.examples, "likelihood": LogProbability(of="mean")}) for problem in asked
        ]
        found = self.search(searches, asked, TEMPERATURE)
        for problem, search, outputs in zip(asked, searches, found, strict=True):
            trace = {
                "kind": "pool",
                "problem": problem.number,
                "texts": [output.text for output in outputs],
                "lengths": [len(output.tokens) for output in outputs],
                "right": [int(problem.right(output.text)) for output in outputs],
                "scores": search.said,
            }
            self.keep(trace)

    def run(self, kind: str, asked: Sequence[Problem]) -> None:
        """A search on these problems, kept as traces."""
        search, temperature, chat = RUNS[kind]
        found = self.search([search(problem) for problem in asked], asked, temperature, chat)
        for problem, (best, *_) in zip(asked, found, strict=True):
            ledger = best.trace.ledger
            trace = {
                "kind": kind,
                "problem": problem.number,
                "text": best.text,
                "passes": best.score == 1,
                "right": int(problem.right(best.text)),
                "tokens": ledger.tokens,
                "scorer_calls": ledger.scorer_calls,
                "depth": ledger.depth,
            }
            self.keep(trace)


def figures(bench: Bench) -> dict[str, Any]:
    """Shares of right programs with 95 % bootstrap intervals over problems, on those of which everything is known.

    over_one: over one sample, on the same problems, paired.
    """
    pools, runs = bench.known("pool"), {kind: bench.known(kind) for kind in RUNS}
    numbers = [number for number in sorted(pools) if all(number in known for known in runs.values())]
    if not numbers:
        return {"problems": 0}
    plain = np.array([estimated(pools[number], "pass@n", "", 1)["right"] for number in numbers])

    def row(method: str, n: int | None, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
        right = np.array([one["right"] for one in each], dtype=np.float64)
        return {
            "method": method,
            "n": n,
            "accuracy": round(float(right.mean()), 4),
            "interval": interval(right),
            "over_one": round(float((right - plain).mean()), 4),
            "over_one_interval": interval(right - plain),
            **{key: round(float(np.mean([s[key] for s in each])), 1) for key in ("tokens", "scorer_calls", "depth")},
        }

    rows = []
    for method, reward in POOLED:
        name = f"{method}, by {'its examples' if reward == 'tests' else reward}" if reward else method
        rows += [row(name, n, [estimated(pools[number], method, reward, n) for number in numbers]) for n in BUDGETS]
    rows += [row(kind, None, [known[number] for number in numbers]) for kind, known in runs.items()]
    return {
        "problems": len(numbers),
        "solved_ever": sum(any(pools[number]["right"]) for number in numbers),
        "pass_examples": sum(score == 1 for number in numbers for score in pools[number]["scores"]["tests"]),
        "pass_examples_and_wrong": sum(
            score == 1 and not right
            for number in numbers
            for score, right in zip(pools[number]["scores"]["tests"], pools[number]["right"], strict=True)
        ),
        "texts": POOL * len(numbers),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=25, help="the first ones")
    parser.add_argument("--work", type=Path, default=Path("search-programs"), help="what is kept between calls")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    bench = Bench(options.work)
    asked = problems()[: options.problems]
    for at in range(0, len(asked), TOGETHER):
        part = asked[at : at + TOGETHER]
        if missing := bench.missing("pool", part):
            bench.draw(missing)
        for kind in RUNS:
            if missing := bench.missing(kind, part):
                bench.run(kind, missing)
        result = {
            "settings": {
                "model": bench.lm.name,
                "dtype": bench.lm.dtype,
                "temperature": TEMPERATURE,
                "tokens": TOKENS,
                "pool": POOL,
                "examples": EXAMPLES,
            },
        }
        found = figures(bench)
        options.out.mkdir(parents=True, exist_ok=True)
        write_result(options.out / "search-programs.json", result, figures=found)
        print(json.dumps(found)[:300], flush=True)


if __name__ == "__main__":
    main()
