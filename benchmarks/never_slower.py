"""Whether `auto` is ever slower than plain decoding: cold, for each kind of text by itself and for many at once.

    python benchmarks/never_slower.py [-m smollm2] [--texts 1 4 16 64] [--each 2] [--new 64] [--timed] [--prices FOLDER]
                                      --out FILE

Texts answer the built-in questions of `decodery bench`, the first of each category. Each has a cache namespace of its
own, so that none profits of another, and prices of steps are unknown at the beginning of each run.

By default passes are counted, which means the same on a busy machine: the tokens are the model's own, and a step takes
what its pass takes by rows in benchmarks/results/passes.json and what benchmarks/results/step-calls.json says of the
time beside it: of `auto` where it looked for drafts or found none affordable, else of plain decoding. `auto` learns
these times with a disturbance in 3 of 100 steps. Plain decoding takes one step for each
token of the longest text; it need not run. With --timed steps take what they take, and runs of both alternate: that is
for a quiet machine, and takes a few minutes.

Reported is the speed of `auto` beside plain decoding, in tokens per second after the prompts: at one text by category,
which should not fall below 0.98, else of all, not below 0.99. What FILE has is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import decodery
from decodery.bench.workloads import questions
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.llm.llm import LLM
from decodery.speculative.drafters.auto_text import AutoBatch
from decodery.speculative.tree_building.native_batch import NativeBatch
from decodery.step.drafter_memory import Memory
from decodery.step.pass_prices import _known
from decodery_benchmarks.experiment import Experiment

RESULTS = Path(__file__).parent / "results"
LEAST = {1: 0.98}
LOOKED, SKIPPED = "auto", "auto, none affordable"
"""Steps that take more than those of plain decoding, by their settings in step-calls.json."""


class Clock:
    """What steps take by rows and texts, simulated.

    Args:
        seed: Of the disturbances.
        prices: A folder with passes.json and step-calls.json.
    """

    def __init__(self, seed: int, prices: Path) -> None:
        known = json.loads((prices / "passes.json").read_text("utf-8"))["rows"]
        points = {each["rows"]: each["ms"] / 1000 for each in known if each["precision"] == "int8"}
        self._rows, self._times = zip(*sorted(points.items()), strict=True)
        calls = json.loads((prices / "step-calls.json").read_text("utf-8"))["rows"]
        self._beside: dict[str, tuple[list[int], list[float]]] = {
            name: ([], []) for name in ("greedy", LOOKED, SKIPPED)
        }
        for each in calls:
            if each["setting"] in self._beside:
                texts, seconds = self._beside[each["setting"]]
                texts.append(each["texts"])
                seconds.append(each["beside_us"] / 1e6)
        for name, (texts, _) in self._beside.items():
            if not texts:
                raise SystemExit(
                    f"{prices / 'step-calls.json'} has no times of {name!r}: measure them with "
                    f"DECODERY_THREADS=1 python benchmarks/step_calls.py --out {prices / 'step-calls.json'}"
                )
        self._chance = np.random.default_rng(seed)

    def step(self, rows: int, texts: int, kind: str | None = None) -> float:
        """Seconds of a step, undisturbed.

        Args:
            rows, texts: Of the step.
            kind: What `auto` did beside its pass; None for nothing.
        """
        last, before = self._times[-1], self._times[-2]
        slope = (last - before) / (self._rows[-1] - self._rows[-2])
        passed = np.interp(rows, self._rows, self._times) + slope * max(rows - self._rows[-1], 0)
        return float(passed + np.interp(texts, *self._beside["greedy"]) + self.beside(texts, kind))

    def beside(self, texts: int, kind: str | None) -> float:
        """Seconds that `auto` takes beside what plain decoding does."""
        drafting, plain = (float(np.interp(texts, *self._beside[name])) for name in (kind or "greedy", "greedy"))
        return max(drafting - plain, 0.0)

    def measured(self, seconds: float) -> float:
        """What a watch says of it."""
        return seconds * (8.0 if self._chance.random() < 0.03 else max(self._chance.normal(1, 0.03), 0.9))


def kind_of(batch: AutoBatch) -> str | None:
    """What `auto` did in the last step beside its pass; None for nothing."""
    return None if batch.resting else LOOKED if batch.looked else SKIPPED


def run(
    lm: LLM, prompts: list[list[int]], drafter: str | None, new: int, clock: Clock | None
) -> tuple[list[int], float]:
    """Tokens of each text after all prompts were read, and the seconds they take."""
    _known.clear()
    charge = NativeBatch.charge
    # Texts begin together, however fast each goes on.
    limits = Limits(rows=sum(map(len, prompts)) + 1024)
    engine = Engine(
        lm.model, memory=Memory(), prefill_chunk=limits.rows, limits=limits, detokenizer=lm.tokenizer.stream
    )
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

        def learned(rows: int, texts: int, context: float, seconds: float) -> None:
            learn(rows, texts, context, clock.measured(clock.step(rows, texts)))

        def charged(batch: NativeBatch, *_: float) -> None:
            taken = clock.beside(engine.running, SKIPPED if batch.state.skipped else LOOKED)
            charge(batch, taken, taken)

        engine._budgets.learn = learned  # type: ignore[method-assign]
        NativeBatch.charge = charged  # type: ignore[method-assign]
    before, seconds, begin = [len(seq.tokens) for seq in texts], 0.0, perf_counter()
    while not all(seq.finished for seq in texts):
        active = sum(not seq.finished for seq in texts)
        engine.step()
        kinds = [kind_of(batch) for batch in engine._arrays._drafts if isinstance(batch, AutoBatch)]
        seconds += 0.0 if clock is None else clock.step(engine.rows, active, kinds[0] if kinds else None)
    NativeBatch.charge = charge  # type: ignore[method-assign]
    took = perf_counter() - begin if clock is None else seconds
    return [len(seq.tokens) - length for seq, length in zip(texts, before, strict=True)], took


def counted(lm: LLM, parts: list[list[list[int]]], new: int, prices: Path) -> float:
    """Speed of `auto` in units of plain decoding, by what passes take.

    Args:
        parts: Prompts that are answered together, one group after another.
        prices: See `Clock`.
    """
    clock, drafting, plain = Clock(1, prices), 0.0, 0.0
    for prompts in parts:
        tokens, seconds = run(lm, prompts, "auto", new, clock)
        drafting += seconds
        active = [sum(length > step for length in tokens) for step in range(max(tokens))]
        plain += sum(clock.step(count, count) for count in active)
    return plain / drafting


def timed(lm: LLM, parts: list[list[list[int]]], new: int, rounds: int) -> float:
    """The same by a watch: the best of some rounds of each, one after the other."""
    best: dict[str | None, float] = {}
    for _ in range(rounds):
        for drafter in (None, "auto"):
            found = [run(lm, prompts, drafter, new, None) for prompts in parts]
            rate = sum(sum(tokens) for tokens, _ in found) / sum(seconds for _, seconds in found)
            best[drafter] = max(best.get(drafter, 0.0), rate)
    return best["auto"] / best[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--each", type=int, default=2, help="questions of a category")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prices", type=Path, default=RESULTS, help="a folder with passes.json and step-calls.json")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="with --timed, runs of each")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lm = decodery.load(given.model)
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    for question in questions("built-in"):
        if len(question.turns[0]) < 2000 and len(by_category[question.category]) < given.each:
            by_category[question.category].append(lm.encode(question.turns[0]))
    every = [prompt for group in by_category.values() for prompt in group]

    def measure(texts: int, category: str) -> dict[str, Any]:
        # More texts than questions: later ones begin with a few words more.
        many = [every[0][: number // len(every)] + every[number % len(every)] for number in range(texts)]
        parts = [[prompt] for prompt in by_category[category]] if texts == 1 else [many]
        speed = (
            timed(lm, parts, given.new, given.rounds) if given.timed else counted(lm, parts, given.new, given.prices)
        )
        return {"speed": round(speed, 4), "enough": speed >= LEAST.get(texts, 0.99)}

    cells = [
        {"texts": texts, "category": category}
        for texts in given.texts
        for category in (by_category if texts == 1 else ["all"])
    ]
    settings = {"model": given.model, "new": given.new, "each": given.each, "timed": given.timed}
    Experiment(cells, measure, settings=settings).measure(given.out)


if __name__ == "__main__":
    main()
