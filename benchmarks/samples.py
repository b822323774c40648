"""What searches over samples find on grade-school problems, at every width, from one pool of texts per problem.

    python benchmarks/samples.py PROBLEMS.jsonl --out POOLS.jsonl [--problems 50] [--pool 16] [--drafter auto]

PROBLEMS: lines of {"question", "answer"}, where answers end with #### and a number. Pools are appended to --out, one
line per problem; those that stand there already are not drawn again. Accuracy with an interval over problems is
printed: best-of-n, pass@n and first-finish exactly over all subsets of a pool, votes over 200 random ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import decodery as dc
from decodery.search.answers import AnswerExtractor
from decodery.search.best_of_n import BestOfN
from decodery.search.estimators import best_of, pass_at, voted
from decodery_benchmarks.intervals import interval

ASK = "{}\nThink step by step, and end with a line #### and the number."


def drawn(lm: dc.LLM, problem: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """A pool of texts: answers, scores and lengths, and whether they ended and are right."""
    begin = perf_counter()
    search = BestOfN("log-probability(of=mean)", n=options.pool)
    settings = {"temperature": options.temperature, "max_new_tokens": options.tokens, "drafter": options.drafter}
    found = lm.search(ASK.format(problem["question"]), search, **settings)
    answers = AnswerExtractor().of([output.text for output in found])
    (wanted,) = AnswerExtractor().of([problem["answer"]])
    return {
        "question": problem["question"],
        "pool": options.pool,
        "answers": answers,
        "right": [int(answer == wanted) for answer in answers],
        "scores": [output.score for output in found],
        "lengths": [len(output.tokens) for output in found],
        "ended": [output.finish_reason == "stop" for output in found],
        "seconds": round(perf_counter() - begin, 2),
        "ledger": found[0].trace.ledger.summary(),
    }


def _races(pool: dict[str, Any]) -> list[float]:
    """Minus the lengths; a text without an end or an answer comes last."""
    counts = zip(pool["lengths"], pool["ended"], pool["answers"], strict=True)
    return [-float(length if ended and answer is not None else 1 << 30) for length, ended, answer in counts]


METHODS: dict[str, Callable[[dict[str, Any], int], float]] = {
    "pass@n": lambda pool, n: pass_at(n, sum(pool["right"]), len(pool["right"])),
    "best-of-n": lambda pool, n: best_of(n, pool["scores"], pool["right"]),
    "self-consistency": lambda pool, n: voted(n, pool["answers"], pool["right"]),
    "weighted-vote": lambda pool, n: voted(n, pool["answers"], pool["right"], np.exp(pool["scores"]).tolist()),
    "first-finish": lambda pool, n: best_of(n, _races(pool), pool["right"]),
}


def report(pools: list[dict[str, Any]], most: int) -> None:
    """Accuracy of every method at every width, and half of its interval over problems."""
    widths = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= most]
    print(f"{len(pools)} problems, {sum(pool['ledger']['tokens'] for pool in pools)} tokens")
    print("method".ljust(18), *(f"n={n}".rjust(14) for n in widths))
    for name, accuracy in METHODS.items():
        cells = []
        for n in widths:
            values = np.array([accuracy(pool, n) for pool in pools])
            low, high = interval(values)
            cells.append(f"{values.mean():.3f} +-{(high - low) / 2:.3f}".rjust(14))
        print(name.ljust(18), *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems_file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--pool", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--drafter", default="auto")
    options = parser.parse_args()
    problems = [json.loads(line) for line in options.problems_file.read_text().splitlines()][: options.problems]
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    pools = {pool["question"]: pool for pool in known if pool["pool"] == options.pool}
    left = [problem for problem in problems if problem["question"] not in pools]
    lm = dc.load(options.model) if left else None
    for number, problem in enumerate(left):
        assert lm is not None
        pool = drawn(lm, problem, options)
        pools[problem["question"]] = pool
        with options.out.open("a") as file:
            file.write(json.dumps(pool) + "\n")
        print(f"{number + 1} of {len(left)}: {sum(pool['right'])} right, {pool['seconds']} s", flush=True)
    report([pools[problem["question"]] for problem in problems], options.pool)


if __name__ == "__main__":
    main()
