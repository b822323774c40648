"""At what price of a question does `auto` do better with the head that comes along than without it?

    python benchmarks/draft/head_worth.py [--shares 0 0.04 0.08 0.12] [--questions 26] [--new 64] [--temperature 0]

Nothing is timed, so that the machine's load does not matter: `auto` is told what passes of the embedded model in int8
took by benchmarks/results/passes.json, and that a question takes a share of a pass over one row. Prompts are questions
of Spec-Bench (DECODERY_DATA), as many of every category, one text after another. Of every share, and of `auto` without
a head: tokens, passes, rows, questions; per_token: what passes and questions take together for a token, in units of a
pass over one row. Adds what it finds to benchmarks/results/draft-head-worth.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from heads import questions

import decodery
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.heads.advice import HeadAdvice
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Memory
from decodery.step.sequence import Sequence

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parents[1] / "results"
ROWS = 1024


class Priced(Auto):
    """`auto` with a head whose questions take a given share of a pass. asked: how many there were."""

    share, asked = 0.0, 0

    def start(self, seq: Sequence) -> Any:
        state = super().start(seq)
        if state.advice is not None:
            state.advice.costs.share = Priced.share
        return state

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        Priced.asked += isinstance(seq.states[self].advice, HeadAdvice) and seq.states[self].advice.costs.idle == 0
        super().observe(seq, seen)


def curve() -> np.ndarray:
    """Seconds of passes over 0, 1, 2, ... rows."""
    known = json.loads((RESULTS / "passes.json").read_text("utf-8"))["rows"]
    points = {each["rows"]: each["ms"] / 1000 for each in known if each["precision"] == "int8"}
    rows, times = sorted(points), [points[n] for n in sorted(points)]
    step = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
    counts = np.arange(ROWS)
    return np.where(counts > rows[-1], times[-1] + step * (counts - rows[-1]), np.interp(counts, rows, times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.04, 0.08, 0.12])
    parser.add_argument("--questions", type=int, default=26)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-head-worth.json")
    options = parser.parse_args()
    lm, seconds, result = decodery.load("smollm2"), curve(), {}
    prompts = [lm.encode(each["turns"][0]) for each in questions(options.questions, 0)]
    for share in [None, *options.shares]:
        Priced.share, Priced.asked = share or 0.0, 0
        drafter = Priced(head=None if share is None else "shipped")
        engine = Engine(lm.model, memory=Memory(), pass_seconds=lambda _: seconds)
        steps = []
        for prompt in prompts:
            sampler = Sampler.from_settings(temperature=options.temperature)
            request = Request(
                prompt,
                max_new_tokens=options.new,
                drafter=drafter,
                sampler=sampler,
                seed=1,
                eos_ids=lm.tokenizer.eos_ids,
            )
            seq = engine.submit(request)
            engine.run([seq])
            steps += seq.trace.decoding
        rows = np.array([step.rows for step in steps])
        tokens = sum(step.emitted for step in steps)
        spent = float(seconds[rows].sum() / seconds[1]) + Priced.share * Priced.asked
        found = {
            "tokens": tokens, "passes": len(steps), "rows": int(rows.sum()), "asked": Priced.asked,
            "per_token": round(spent / tokens, 4),
        }  # fmt: skip
        result["without" if share is None else str(share)] = found
        print(share, json.dumps(found), flush=True)
    command = shlex.join(["python", *sys.argv])
    known = list(begun_result(options.out)["rows"])
    known = [each for each in known if each["command"] != command]
    write_result(options.out, {"rows": [*known, {"command": command, "shares": result}]})


if __name__ == "__main__":
    main()
