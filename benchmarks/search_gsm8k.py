"""What searches make of a small model on real questions: GSM8K, the embedded model, a reward head of its own texts.

    python benchmarks/search_gsm8k.py [--questions 20] [--learn 30] [--work DIR] [--out benchmarks/results]

Of the GSM8K training problems (DECODERY_DATA) four with two calculations, with their solutions, stand before every
question. Compared are searches on questions whose solution has at most one calculation, because the model all but never
answers others: a sample of those is drawn, too, to tell how often. On the first `--learn` of the easy ones the
model draws texts, which are told right or wrong by their answer; a head learns that at the end of every line (as
`decodery train text-prm` does). On the last ones, which nothing was learned from, a pool of samples is drawn, from
which voting and choosing are computed at every width, and the searches over steps are run. Nothing is timed. Everything
is kept in --work; the next call goes on from there, and search-gsm8k.json holds all questions of which everything is
known.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import decodery as dc
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.prefixes import PrefixCache
from decodery.models.loaders.store import terminal_progress
from decodery.scorers import ProcessReward
from decodery.search.answers import AnswerExtractor
from decodery.search.base import Search
from decodery.step.scorer import Scorer
from decodery.training.kind import Run
from decodery.training.text_prm import JudgedText, TextPRMRecipe, train_text_prm
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.results import write_result
from decodery_benchmarks.searches.pools import Sampling, estimated

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
RESULTS = Path(__file__).parent / "results"
SHOTS, CALCULATIONS = 4, 1
LEARNED, POOL, TOGETHER = 8, 8, 5
"""Texts drawn to learn from and for a pool; questions that share their passes."""
HARDER, HARDER_TEXTS = (2, 3, 4), 2
"""Calculations of questions that are only sampled, twelve of each number, and texts drawn of each."""
TOKENS, TEMPERATURE = 120, 0.8
STOP = ("\n\n", "Question:")
RUNS = (
    "step-beam(n=4,m=2,scorer={head},delimiter={line},rounds=12)",
    "step-beam(n=8,m=4,scorer={head},delimiter={line},rounds=12)",
    "dvts(n=4,m=2,scorer={head},delimiter={line},rounds=12)",
    "dvts(n=8,m=4,scorer={head},delimiter={line},rounds=12)",
    "particle-filter(particles=4,scorer={head},delimiter={line},rounds=12)",
    "particle-filter(particles=8,scorer={head},delimiter={line},rounds=12)",
    'budget-forcing(end="####",wait="Wait, let us check:",ignore=1)',
    'budget-forcing(end="####",wait="Wait, let us check:",ignore=2)',
)
POOLED = ("pass@n", "self-consistency", "best-of-n", "weighted-vote")
BUDGETS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Question:
    number: int
    text: str
    solution: str
    calculations: int

    @property
    def answer(self) -> str | None:
        return AnswerExtractor("marked").of([self.solution])[0]


def questions() -> list[Question]:
    """All of them; the marks of calculations are left out of solutions."""
    lines = (DATA / "gsm8k_train_1000.jsonl").read_text("utf-8").splitlines()
    found = []
    for number, entry in enumerate(map(json.loads, lines)):
        solution = re.sub(r"<<.*?>>", "", entry["answer"])
        found.append(Question(number, entry["question"], solution, entry["answer"].count("<<")))
    return found


class Bench:
    """The model, its questions, and what was drawn so far: `traces`, a line each in a file of the folder `work`."""

    def __init__(self, work: Path, held_out: int, learn: int) -> None:
        every = questions()
        self.shots = [question for question in every if question.calculations == 2][:SHOTS]
        easy = [question for question in every if question.calculations <= CALCULATIONS]
        self.learn, self.held_out = easy[:-held_out][:learn], easy[-held_out:]
        if not self.learn:
            raise SystemExit(f"there are {len(easy)} questions, of which some are to learn from: ask for fewer")
        self.harder = [
            question
            for wanted in HARDER
            for question in [each for each in every if each.calculations == wanted][SHOTS : SHOTS + 12]
        ]
        self.work, self.path = work, work / "traces.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        self.traces: list[dict[str, Any]] = []
        if self.path.is_file():
            self.traces = [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]
        self.lm = dc.load("smollm2")
        self._engine = Engine(self.lm.model, detokenizer=self.lm.tokenizer.stream, prefixes=PrefixCache(1 << 28))
        head = "".join(f"Question: {shot.text}\nAnswer: {shot.solution}\n\n" for shot in self.shots)
        self._shots = head
        self._begin = self.lm.encode(head, apply_chat_template=False)
        self._read = False

    def prompt(self, question: Question) -> list[int]:
        return self.lm.encode(f"{self._shots}Question: {question.text}\nAnswer:", apply_chat_template=False)

    def search(
        self, searches: Sequence[Search], asked: Sequence[Question], temperature: float = TEMPERATURE
    ) -> list[list[dc.Output]]:
        """What a search finds for each of these questions, which share their passes."""
        if not self._read:
            # The solved questions, read once for all.
            self._engine.run([self._engine.submit(self.lm.request(self._begin, max_new_tokens=1, drafter=None))])
            self._read = True
        jobs = []
        for question, search in zip(asked, searches, strict=True):
            request = self.lm.request(
                self.prompt(question),
                temperature=temperature,
                max_new_tokens=TOKENS,
                drafter=None,
                stop=STOP,
                seed=question.number << 20,
            )
            jobs.append(self._engine.enter(search.bind(self.lm.tokenizer).find(self._engine, request)))
        self._engine.run(jobs)
        return [[self.lm.output(seq) for seq in job.result or ()] for job in jobs]

    def keep(self, traces: Sequence[dict[str, Any]]) -> None:
        self.traces += traces
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(trace) + "\n" for trace in traces))

    def missing(self, kind: str, asked: Sequence[Question]) -> list[Question]:
        known = {trace["question"] for trace in self.traces if trace["kind"] == kind}
        return [question for question in asked if question.number not in known]


def groups(asked: Sequence[Question]) -> Iterator[Sequence[Question]]:
    for at in range(0, len(asked), TOGETHER):
        yield asked[at : at + TOGETHER]


def draw(bench: Bench, kind: str, asked: Sequence[Question], n: int, scorers: dict[str, Scorer]) -> None:
    """Pools of n texts for these questions, kept as traces of this kind."""
    searches = [Sampling(n, scorers) for _ in asked]
    traces = []
    for question, outputs, search in zip(asked, bench.search(searches, asked), searches, strict=True):
        answers = AnswerExtractor().of([output.text for output in outputs])
        traces.append(
            {
                "kind": kind,
                "question": question.number,
                "texts": [output.text for output in outputs],
                "tokens": [output.tokens for output in outputs],
                "lengths": [len(output.tokens) for output in outputs],
                "ended": [int(output.finish_reason == "stop") for output in outputs],
                "answers": answers,
                "right": [int(answer is not None and answer == question.answer) for answer in answers],
                "scores": search.said,
            }
        )
    bench.keep(traces)


def run(bench: Bench, method: str, asked: Sequence[Question], search: Search, temperature: float = TEMPERATURE) -> None:
    """A search on these questions, kept as traces."""
    traces = []
    for question, outputs in zip(asked, bench.search([search] * len(asked), asked, temperature), strict=True):
        best, ledger = outputs[0], outputs[0].trace.ledger
        answer = AnswerExtractor().of([best.text])[0]
        traces.append(
            {
                "kind": method,
                "question": question.number,
                "text": best.text,
                "right": int(answer is not None and answer == question.answer),
                "tokens": ledger.tokens,
                "scorer_calls": ledger.scorer_calls,
                "depth": ledger.depth,
            }
        )
    bench.keep(traces)


def learned(bench: Bench) -> ProcessReward:
    """The head, trained where it is not there yet, as a scorer."""
    path = bench.work / "process-reward.safetensors"
    if not path.is_file():
        numbers = {question.number: question for question in bench.learn}
        judged = [
            JudgedText(bench.prompt(numbers[trace["question"]]), tokens, float(right))
            for trace in bench.traces
            if trace["kind"] == "learn" and trace["question"] in numbers
            for tokens, right in zip(trace["tokens"], trace["right"], strict=True)
            if tokens
        ]
        with terminal_progress(counts=True) as progress:
            train_text_prm(Run(bench.lm, bench.work, (TextPRMRecipe(delimiter="\n"),), progress), judged)
    return ProcessReward(str(path))


def named(bench: Bench, method: str) -> Search:
    """The search that a method's text stands for, with the trained head and the end of a line in their places."""
    path = bench.work / "process-reward.safetensors"
    text = method.replace("{head}", f'process-reward(head="{path}")').replace("{line}", '"\n"')
    found: Search = resolve("search", text)
    return found


def at_tokens(pool: dict[str, Any], method: str, tokens: float) -> float:
    """How often a method over samples is right that writes as many tokens, between whole widths in proportion."""
    n = min(max(tokens * POOL / sum(pool["lengths"]), 1.0), float(POOL))
    below = int(n)
    share = n - below
    low, high = (estimated(pool, method, "head", each)["right"] for each in (below, min(below + 1, POOL)))
    return float((1 - share) * low + share * high)


def figures(bench: Bench) -> dict[str, Any]:
    """Accuracy with 95 % bootstrap intervals over questions, on those of which everything is known.

    over_one: over one sample, on the same questions, paired; over_vote: over self-consistency with as many tokens.
    """
    held = [question.number for question in bench.held_out]
    kinds = ("pool", "greedy", *RUNS)
    known = {kind: {t["question"]: t for t in bench.traces if t["kind"] == kind} for kind in kinds}
    numbers = [number for number in held if all(number in known[kind] for kind in kinds)]
    if not numbers:
        return {"questions": 0}
    pools = [known["pool"][number] for number in numbers]
    plain = np.array([estimated(pool, "pass@n", "head", 1)["right"] for pool in pools])

    def row(method: str, n: int | None, right: Sequence[float], spent: Sequence[dict[str, Any]]) -> dict[str, Any]:
        values = np.array(right, dtype=np.float64)
        tokens = [one["tokens"] for one in spent]
        voted = np.array([at_tokens(pool, "self-consistency", t) for pool, t in zip(pools, tokens, strict=True)])
        return {
            "method": method,
            "n": n,
            "accuracy": round(float(values.mean()), 4),
            "interval": interval(values),
            "over_one": round(float((values - plain).mean()), 4),
            "over_one_interval": interval(values - plain),
            "over_vote": round(float((values - voted).mean()), 4),
            "over_vote_interval": interval(values - voted),
            **{key: round(float(np.mean([s[key] for s in spent])), 1) for key in ("tokens", "scorer_calls", "depth")},
        }

    rows = []
    for method in POOLED:
        for n in BUDGETS:
            each = [estimated(pool, method, "head", n) for pool in pools]
            rows.append(row(method, n, [one["right"] for one in each], each))
    for kind in kinds[1:]:
        each = [known[kind][number] for number in numbers]
        rows.append(row(kind, None, [one["right"] for one in each], each))
    calculations = {question.number: question.calculations for question in bench.harder}
    harder = [trace for trace in bench.traces if trace["kind"] == "harder"]
    head = ProcessReward(str(bench.work / "process-reward.safetensors")).trained.facts
    return {
        "questions": len(numbers),
        "answered_ever": sum(any(pool["right"]) for pool in pools),
        "harder": {
            str(wanted): [sum(sum(t["right"]) for t in of), sum(len(t["right"]) for t in of)]
            for wanted in HARDER
            for of in [[trace for trace in harder if calculations[trace["question"]] == wanted]]
        },
        "head": {name: value for name, value in (head or {}).items() if name != "command"},
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=20, help="held-out questions")
    parser.add_argument("--learn", type=int, default=30, help="questions whose texts the head learns from")
    parser.add_argument("--work", type=Path, default=Path("search-gsm8k"), help="what is kept between calls")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    bench = Bench(options.work, options.questions, options.learn)
    for asked in groups(bench.missing("learn", bench.learn)):
        draw(bench, "learn", asked, LEARNED, {})
        right = [sum(trace["right"]) for trace in bench.traces if trace["kind"] == "learn"]
        print(f"learn: {sum(right)} of {len(right) * LEARNED} texts are right", flush=True)
    head = learned(bench)
    for asked in groups(bench.missing("harder", bench.harder)):
        draw(bench, "harder", asked, HARDER_TEXTS, {})
    for part in groups(bench.held_out):
        if asked := bench.missing("pool", part):
            draw(bench, "pool", asked, POOL, {"head": head})
        if asked := bench.missing("greedy", part):
            run(bench, "greedy", asked, resolve("search", "best-of-n:scorer=log-probability,n=1"), 0.0)
        for method in RUNS:
            if asked := bench.missing(method, part):
                run(bench, method, asked, named(bench, method))
        result = {
            "settings": {
                "model": bench.lm.name,
                "dtype": bench.lm.dtype,
                "temperature": TEMPERATURE,
                "tokens": TOKENS,
                "shots": SHOTS,
                "calculations": CALCULATIONS,
                "learned_from": {"questions": len(bench.learn), "texts": LEARNED},
                "pool": POOL,
            },
        }
        found = figures(bench)
        options.out.mkdir(parents=True, exist_ok=True)
        write_result(options.out / "search-gsm8k.json", result, figures=found)
        print(json.dumps(found)[:3000], flush=True)


if __name__ == "__main__":
    main()
