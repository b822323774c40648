"""Tokens per second with 0, 1 and 5 monitors, as ratios to none in the same run, plain and drafting.

    python benchmarks/monitor_overhead.py [--rounds 3] [--prompts 8] [--out benchmarks/results/monitor-overhead.json]

Needs a machine that does nothing else. The built-in questions, greedily, 96 tokens each; the order of the settings
turns from round to round, and every ratio is the median over rounds. Texts under monitors that only read are compared
with those without, and a difference ends the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import decodery
from decodery.bench.workloads import questions
from decodery_benchmarks.results import write_result

ONE = ("confidence:measure=mean",)
FIVE = (*ONE, "confidence:measure=worst", "confidence:measure=first", "confidence:measure=entropy", "context-awareness")
SETTINGS = [(drafter, monitors) for drafter in (None, "auto") for monitors in ((), ONE, FIVE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lm = decodery.load("smollm2")
    asked = [question.turns[0] for question in questions("built-in", most=given.prompts)]
    lm.generate(asked[0], max_new_tokens=8)
    rates: dict[tuple[Any, Any], list[float]] = {setting: [] for setting in SETTINGS}
    texts: dict[str, list[int]] = {}
    for number in range(given.rounds):
        for setting in SETTINGS[number % len(SETTINGS) :] + SETTINGS[: number % len(SETTINGS)]:
            tokens, begin = 0, perf_counter()
            for prompt in asked:
                drafter, monitors = setting
                # An answer that was written before would come from memory.
                lm.reset_memory()
                output = lm.generate(prompt, max_new_tokens=96, drafter=drafter, monitor=list(monitors))
                if texts.setdefault(prompt, output.tokens) != output.tokens:
                    raise SystemExit(f"{monitors} with {drafter} changed the answer to {prompt!r}")
                tokens += len(output.tokens)
            rates[setting].append(tokens / (perf_counter() - begin))
    rows = []
    for drafter, monitors in SETTINGS:
        against = [own / none for own, none in zip(rates[drafter, monitors], rates[drafter, ()], strict=True)]
        rate = round(median(rates[drafter, monitors]), 1)
        row = {
            "drafter": drafter,
            "monitors": len(monitors),
            "tokens per second": rate,
            "ratio": round(median(against), 3),
        }
        rows.append(row)
        print(row)
    if given.out:
        found = {"model": lm.name, "prompts": len(asked), "rounds": given.rounds, "memory": "fresh", "rows": rows}
        write_result(given.out, found)


if __name__ == "__main__":
    main()
