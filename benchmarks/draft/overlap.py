"""What drafting while the target verifies is worth on this machine: wall-clock of `pearl` beside `draft-model`.

    python benchmarks/draft/overlap.py [--new 64] [--rounds 3] [--ratios 4 8 20]

Part one: the embedded model in bfloat16 and the draft that comes with it, on four questions. Part two: target and draft
are one tiny model whose passes are made to take longer, in two ways: asleep, as if each had a device of its own, and
reading memory, as two models do that share a bus. A pass of the target takes `ratio` times what one of the draft does;
every draft is right, so that what differs is order alone. Of every pair: milliseconds per token, the best of `rounds`,
taken in turns. Writes benchmarks/results/draft-overlap.json after every pair; one that is there is not measured again
by the same command. To be run on a machine that does nothing else; about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

import decodery
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Scores
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.pearl import Pearl
from decodery.step.drafter import Drafter
from decodery.testing import tiny_transformer
from decodery.testing.models import Counted

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = (
    "Explain how tides arise.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Give three tips for learning a language.",
)
UNIT = 0.004
"""Seconds of a pass of the draft."""


class Slow(Counted):
    """A model whose passes take at least `seconds`, asleep or reading memory."""

    def __init__(self, model: Any, seconds: float, reads: bool) -> None:
        super().__init__(model)
        self._seconds, self._reads = seconds, reads
        self._weights = torch.ones(1 << 24) if reads else torch.empty(0)
        taken = []
        for _ in range(4):
            begin = perf_counter()
            self._weights.sum()
            taken.append(perf_counter() - begin)
        self._sweeps = max(1, round(seconds / max(min(taken), 1e-6)))

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        if self._reads:
            for _ in range(self._sweeps):
                self._weights.sum()
        else:
            sleep(self._seconds)
        return super().forward(batch, **settings)


def seconds_per_token(engine: Engine, prompts: list[list[int]], drafter: Drafter | None, new: int) -> float:
    tokens, begin = 0, perf_counter()
    for prompt in prompts:
        seq = engine.submit(Request(prompt, drafter=drafter, max_new_tokens=new))
        engine.run([seq])
        tokens += len(seq.generated)
    return (perf_counter() - begin) / tokens


def compared(engine: Engine, prompts: list[list[int]], drafters: dict[str, Drafter | None], options: Any) -> Any:
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, drafter in drafters.items():
            taken = seconds_per_token(engine, prompts, drafter, options.new)
            best[name] = min(taken, best.get(name, taken))
    found = {name: round(1e3 * taken, 3) for name, taken in best.items()}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratios", type=int, nargs="+", default=[4, 8, 20])
    options = parser.parse_args()
    path, command = RESULTS / "draft-overlap.json", shlex.join(["python", *sys.argv])
    found: dict[str, Any] = begun_result(path)
    if found.get("command") != command:
        found = {"command": command, "unit": "milliseconds per token", "threads": torch.get_num_threads(), "rows": {}}

    def keep(name: str, engine: Engine, prompts: list[list[int]], drafters: dict[str, Drafter | None]) -> None:
        if name not in found["rows"]:
            found["rows"][name] = compared(engine, prompts, drafters, options)
            write_result(path, found)

    lm = decodery.load("smollm2", dtype="bfloat16")
    own = [lm.tokenizer.encode(text) for text in PROMPTS]
    drafters: dict[str, Drafter | None] = {"plain": None}
    for length in (3, 4, 6):
        drafters |= {f"draft-model {length}": DraftModel(length=length), f"pearl {length}": Pearl(length=length)}
    keep("smollm2", Engine(lm.model), own, drafters)
    tiny = tiny_transformer(0)
    for reads in (False, True):
        for ratio in options.ratios:
            target, draft = Slow(tiny, ratio * UNIT, reads), Slow(tiny, UNIT, reads)
            length = min(ratio, 16)
            pair: dict[str, Drafter | None] = {"plain": None, "draft-model": DraftModel(draft, length=length)}
            pair["pearl"] = Pearl(draft, length=length)
            keep(f"{'one bus' if reads else 'two devices'}, 1:{ratio}", Engine(target), [[1, 2, 3]], pair)


if __name__ == "__main__":
    main()
