"""What drafting with the target's own layers, and leaving it early, brings on the embedded model.

    OMP_NUM_THREADS=1 python benchmarks/draft/own_layers.py [--questions 16] [--new 32] [--skips DIR ...]

Prompts are questions of Spec-Bench (DECODERY_DATA) of up to 400 characters, evenly spread, decoded greedily as one
batch. Of every method: tokens per pass of the target; units, which count what a pass of one text loads: an attention
sublayer 1/4 and an MLP 3/4 of a layer, the head 8 layers, so that a whole pass is 38; gain, plain units by its own;
speed, plain CPU time in this run by its own. skips: folders of `decodery train swift`. Writes
benchmarks/results/draft-own-layers.json after every method.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import decodery
from decodery.engine import pass_runner
from decodery.logits_sources.calm import CALM
from decodery.models.layer_plan import layer_steps
from decodery.models.trained.skips import SkipSet
from decodery.speculative.drafters.dynamic_exit import DEL
from decodery.speculative.drafters.swift import Swift
from decodery.speculative.trees.caterpillar import Caterpillar
from decodery.step.forward_request import ForwardRequest
from decodery.training.calm import rouge_l

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parents[1] / "results"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
ATTENTION, MLP, HEAD = 0.25, 0.75, 8.0
SIX = SkipSet(frozenset(("attention.7", "attention.9", "attention.12", "attention.14", "attention.26", "mlp.9")), 30)
"""Sublayers without which, one at a time, the embedded model most often finds the same token most likely."""
CHAIN = Caterpillar(length=2, stop=0.5, greedy=(1, 1, 1, 1))


class Units:
    """Counts what every ask loads. drafts: passes of roles of their own; others: all the rest but the prompt."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.drafts, self.draft_units, self.units = 0, 0.0, 0.0

    def count(self, ask: ForwardRequest) -> None:
        if not ask.role and len(ask.segment) > 1 and ask.segment.cache is not None and not ask.segment.cache.length:
            return  # a prompt
        run = layer_steps(ask.layer_plan, ask.model.config.num_layers)
        wanted = ask.segment.logit_rows is None or len(ask.segment.logit_rows) > 0
        units = sum(ATTENTION * stop.attention + MLP * stop.mlp for stop in run) + HEAD * wanted
        self.units += units
        if ask.role == "draft":
            self.drafts += 1
            self.draft_units += units

    def watching(self, answer: Callable[[Sequence[ForwardRequest]], Any]) -> Callable[[Sequence[ForwardRequest]], Any]:
        def answered(asks: Sequence[ForwardRequest]) -> Any:
            for ask in asks:
                self.count(ask)
            return answer(asks)

        return answered


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--skips", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    short = [text for line in lines if len(text := json.loads(line)["turns"][0]) <= 400]
    prompts = short[:: len(short) // options.questions][: options.questions]
    units = Units()
    pass_runner.answer = units.watching(pass_runner.answer)

    def run(**settings: Any) -> dict[str, Any]:
        units.clear()
        lm.reset_memory()
        begin = process_time()
        outputs = lm.generate(prompts, max_new_tokens=options.new, **settings)
        seconds = process_time() - begin
        traces = [output.trace for output in outputs]
        passes, tokens = sum(trace.passes for trace in traces), sum(trace.tokens for trace in traces)
        counts: dict[str, float] = {}
        for trace in traces:
            for name, amount in trace.ledger.counts.items():
                counts[name] = counts.get(name, 0.0) + amount
        found = {
            "tokens_per_pass": tokens / passes,
            "units_per_token": (units.units + HEAD * passes * ("shadow rows" in counts)) / tokens,
            "draft_passes_per_pass": units.drafts / passes,
            "draft_step_in_passes": units.draft_units / units.drafts / 38 if units.drafts else 0.0,
            "seconds": seconds,
            "counts": counts,
        }
        return {**found, "texts": [output.tokens for output in outputs]}

    plain = run(drafter=None)
    whole = plain.pop("texts")
    runs: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {
        "swift, search from every odd layer": {"drafter": Swift(window=8)},
        "swift, six best left out alone": {"drafter": Swift(SIX)},
        "swift, six, chain of 2": {"drafter": Swift(SIX, tree_policy=CHAIN)},
        **{f"swift, {folder.name}": {"drafter": Swift(str(folder))} for folder in options.skips},
        **{
            f"swift, {folder.name}, chain of 2": {
                "drafter": Swift(str(folder), tree_policy=Caterpillar(2, 0.5, *([(1,) * 4] * 2)))
            }
            for folder in options.skips
        },
        "del": {"drafter": DEL((4, 12, 20, 26))},
        "del, head=8": {"drafter": DEL((4, 12, 20, 26), head=8.0)},
        **{f"calm, state {t}": {"drafter": None, "logits_source": CALM(t, tokens=options.new)} for t in (0.98, 0.95)},
        **{
            f"calm, softmax {t}": {"drafter": None, "logits_source": CALM(t, "softmax", tokens=options.new)}
            for t in (0.9, 0.5)
        },
    }
    for name, each in settings.items():
        found = run(**each)
        texts = found.pop("texts")
        same = sum(text == full for text, full in zip(texts, whole, strict=True))
        found["texts_as_plain"] = same
        found["rouge_l"] = sum(rouge_l(text, full) for text, full in zip(texts, whole, strict=True)) / len(whole)
        found["gain_in_units"] = plain["units_per_token"] / found["units_per_token"]
        found["speed"] = plain["seconds"] / found["seconds"]
        runs[name] = found
        print(name, json.dumps(found), flush=True)
        write(options, plain, runs)


def write(options: argparse.Namespace, plain: dict[str, Any], runs: dict[str, Any]) -> None:
    command = f"OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}"
    facts = {"command": command, "questions": options.questions, "new_tokens": options.new, "plain": plain}
    path = RESULTS / "draft-own-layers.json"
    write_result(path, rounded({**facts, "rows": runs}), summary=["plain"])


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
