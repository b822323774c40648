"""Whether `auto` is ever slower than plain decoding: cold, for each kind of text by itself and for many at once.

    python benchmarks/never_slower.py [-m smollm2] [--texts 1 4 16 64] [--new 64] [--real] [--out FILE]

Texts answer the built-in questions of `decodery bench`. Each has a cache namespace of its own, so that none profits of
another, and prices of steps are unknown at the beginning of each run. By default the clock is simulated: a step takes
what its pass takes by rows in benchmarks/results/passes.json, with a disturbance in 3 of 100 steps, and what
benchmarks/results/step-calls.json says of the time beside it; the tokens are the model's own. With --real steps take
what they take, and runs of both alternate: that is for a quiet machine. Reported is the speed of `auto` beside plain
decoding, in tokens per second after the prompts: at one text by category, which should not fall below 0.98, else of
all, not below 0.99.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import decodery
from decodery.bench.workloads import questions
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.step.drafter_memory import Memory
from decodery.step.pass_prices import _known
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parent / "results"
LEAST = {1: 0.98}


class Clock:
    """What steps take by rows and texts, simulated.

    Args:
        seed: Of the disturbances.
    """

    def __init__(self, seed: int) -> None:
        known = json.loads((RESULTS / "passes.json").read_text("utf-8"))["rows"]
        points = {each["rows"]: each["ms"] / 1000 for each in known if each["precision"] == "int8"}
        self._rows, self._times = zip(*sorted(points.items()), strict=True)
        calls = json.loads((RESULTS / "step-calls.json").read_text("utf-8"))["rows"]
        self._beside: dict[str, tuple[list[int], list[float]]] = {"greedy": ([], []), "auto": ([], [])}
        for each in calls:
            if each["setting"] in self._beside:
                texts, seconds = self._beside[each["setting"]]
                texts.append(each["texts"])
                seconds.append(each["beside_us"] / 1e6)
        self._chance = np.random.default_rng(seed)

    def step(self, rows: int, texts: int, drafting: bool) -> float:
        """Seconds of a step, undisturbed."""
        last, before = self._times[-1], self._times[-2]
        slope = (last - before) / (self._rows[-1] - self._rows[-2])
        passed = np.interp(rows, self._rows, self._times) + slope * max(rows - self._rows[-1], 0)
        return float(passed + np.interp(texts, *self._beside["auto" if drafting else "greedy"]))

    def measured(self, seconds: float) -> float:
        """What a watch says of it."""
        return seconds * (8.0 if self._chance.random() < 0.03 else max(self._chance.normal(1, 0.03), 0.9))


def run(lm: LLM, prompts: list[list[int]], drafter: str | None, new: int, clock: Clock | None) -> tuple[int, float]:
    """Tokens and seconds after the prompts were read."""
    _known.clear()
    engine = Engine(lm.model, memory=Memory(), detokenizer=lm.tokenizer.stream)
    texts = [
        engine.submit(
            Request(
                prompt, max_new_tokens=new, drafter=drafter, eos_ids=lm.tokenizer.eos_ids, cache_namespace=str(number)
            )
        )
        for number, prompt in enumerate(prompts)
    ]
    while any(seq.position < 1 for seq in texts):
        engine.step()
    if clock is not None:
        learn = engine._budgets.learn

        def learned(rows: int, count: int, context: float, seconds: float) -> None:
            learn(rows, count, context, clock.measured(clock.step(rows, count, drafter is not None)))

        engine._budgets.learn = learned  # type: ignore[method-assign]
    before, seconds, begin = sum(len(seq.tokens) for seq in texts), 0.0, perf_counter()
    while not all(seq.finished for seq in texts):
        count = sum(not seq.finished for seq in texts)
        engine.step()
        seconds += 0.0 if clock is None else clock.step(engine.rows, count, drafter is not None)
    took = perf_counter() - begin if clock is None else seconds
    return sum(len(seq.tokens) for seq in texts) - before, took


def speed(measure: Callable[[str | None], tuple[int, float]], rounds: int) -> float:
    """Of `auto`, in units of plain decoding: the best of some rounds of each, one after the other."""
    best: dict[str | None, float] = {}
    for _ in range(rounds):
        for drafter in (None, "auto"):
            tokens, seconds = measure(drafter)
            best[drafter] = max(best.get(drafter, 0.0), tokens / seconds)
    return best["auto"] / best[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lm, rows = decodery.load(given.model), list[dict[str, Any]]()
    asked = questions("built-in")
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    for each in asked:
        if len(each.turns[0]) < 2000:
            by_category[each.category].append(lm.encode(each.turns[0]))
    every = [prompt for group in by_category.values() for prompt in group]
    rounds = given.rounds if given.real else 1
    for count in given.texts:
        # More texts than questions: later ones begin with a word more.
        many = [every[n % len(every)] + every[0][: n // len(every)] for n in range(count)]
        groups = by_category if count == 1 else {"all": many}
        for category, prompts in groups.items():
            clock = None if given.real else Clock(1)

            def measure(drafter: str | None, prompts: list = prompts, count: int = count, clock: Any = clock) -> Any:
                parts = [prompts] if count > 1 else [[prompt] for prompt in prompts]
                found = [run(lm, part, drafter, given.new, clock) for part in parts]
                return sum(tokens for tokens, _ in found), sum(seconds for _, seconds in found)

            row = {"texts": count, "category": category, "speed": round(speed(measure, rounds), 4)}
            rows.append(row)
            print(row, "" if row["speed"] >= LEAST.get(count, 0.99) else "slower than allowed", flush=True)
    if given.out:
        command = shlex.join(["python", *sys.argv])
        settings = {"model": given.model, "new": given.new, "clock": "real" if given.real else "simulated"}
        write_result(given.out, {"command": command, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
