"""Calls of Python and C functions in one step of decoding, and CPU time beside the model's pass, by number of texts.

    python benchmarks/step_calls.py [--model smollm2] [--texts 1 4 16 64] [--out benchmarks/results/step-calls.json]

Every text writes greedily, also under a memory limit as a server has and with log-probabilities, with top-p, with the
drafter `auto`, under a JSON schema, also with `auto`, or under a cache policy, which takes each text out of the arrays.
Calls are those that `sys.setprofile` reports, on average over some steps. The time beside the pass is that of the
stepping thread in `Engine.step` less what layers and head take, as `time.thread_time` has it, the least of several
steps: other programs on the machine can only add to it.
Of `auto` there are steps in which it looks for drafts, whose price it can always pay here, and steps in which it finds
that no draft is affordable; all others are steps of plain decoding.
Where one native call takes the whole step, its choice of tokens is made once more to tell it from the pass; under a
schema the time beside the pass has masks and states in it. Set DECODERY_THREADS=1, so that no thread waits for another.
"""

from __future__ import annotations

import argparse
import sys
from ctypes import addressof
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

import decodery
from decodery.constraints import JSONSchema
from decodery.core.native.kernels import library
from decodery.core.native.structs import ArrayStepStruct, SamplingStruct
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.sampling.constraint import Constrained
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto_text import AutoBatch
from decodery.speculative.drafters.forced_batch import ForcedBatch
from decodery_benchmarks.results import write_result

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, limited": {},
    "log-probabilities": {"logprobs": 1},
    "top-p": {"sampler": Sampler.from_settings(temperature=0.8, top_p=0.95)},
    "auto": {"drafter": "auto"},
    "auto, none affordable": {"drafter": "auto"},
    "json schema": {},
    "json schema, auto": {"drafter": "auto"},
    "quest": {"cache_policy": "quest"},
}
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 2000}
LIMITS = {"greedy, limited": Limits(cache_bytes=4 << 30)}
CREDIT = {"auto": 1e6, "auto, none affordable": -1e6, "json schema, auto": 1e6}
"""What drafts may lose."""
PASSES = ("decodery_layers", "decodery_head", "decodery_step")
PROMPT = list(range(40, 72))
_TRIES = 4
"""Steps that are taken at most for one that counts."""


class Timed:
    """A function of the native library that adds up the CPU time of the passes in its calls.

    Args:
        sample: The library's choice of tokens.
    """

    def __init__(self, function: Any, sample: Any) -> None:
        self._function, self._sample, self.seconds, self.again = function, sample, 0.0, 0.0

    def __call__(self, *given: Any) -> Any:
        begin = thread_time()
        code = self._function(*given)
        self.seconds += thread_time() - begin
        if self._function.__name__ == "decodery_step":
            begin = thread_time()
            self.seconds -= self._sampling(ArrayStepStruct.from_address(given[1]))
            self.again += thread_time() - begin
        return code

    def _sampling(self, step: ArrayStepStruct) -> float:
        """Seconds that the choice of tokens takes, with results of its own."""
        copy = SamplingStruct.from_buffer_copy(step.sampling)
        rows = [np.zeros(step.passed.rows, dtype=dtype) for dtype in (np.int32, np.int32, np.int64)]
        copy.paths, copy.accepted, copy.chosen = (each.ctypes.data for each in rows)
        begin = thread_time()
        self._sample(addressof(copy))
        return thread_time() - begin


def started(lm: Any, texts: int, name: str, length: int) -> Engine:
    """An engine whose texts of a setting have all read their prompts."""
    engine, settings = Engine(lm.model, limits=LIMITS.get(name)), SETTINGS[name]
    if name.startswith("json schema"):
        constraint = JSONSchema(SCHEMA).compile(lm.vocabulary)
        settings = settings | {"sampler": Sampler((Constrained(constraint), *Sampler.from_settings().processors))}
    seqs = [
        engine.submit(Request([*PROMPT, 100 + number], max_new_tokens=length, seed=number, **settings))
        for number in range(texts)
    ]
    while any(seq.position < 4 for seq in seqs):
        engine.step()
    return engine


def credited(engine: Engine, credit: float | None) -> list[AutoBatch]:
    """What drafts may lose in the next step, of all that `auto` makes."""
    drafts = [each._drafts if isinstance(each, ForcedBatch) else each for each in engine._arrays._drafts]
    batches = [each for each in drafts if isinstance(each, AutoBatch)]
    for each in batches if credit is not None else ():
        each.rests, each._native.state.balance, each._native.state.resting = 0, credit, 0
    return batches


def calls(engine: Engine, steps: int, credit: float | None) -> float:
    """Calls in one step."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(steps):
        credited(engine, credit)
        sys.setprofile(seen)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return count / steps


def beside(engine: Engine, steps: int, credit: float | None) -> tuple[float, float]:
    """The least CPU seconds of a step beside native passes, and of its passes, of some steps.

    credit: what drafts of `auto` may lose in each; if it is positive, steps count in which these are looked for.
    """
    lib = library()
    known = {name: getattr(lib, name) for name in PASSES if hasattr(lib, name)}
    timed = {name: Timed(function, lib.decodery_sample) for name, function in known.items()}
    vars(lib).update(timed)
    found = []
    try:
        for _ in range(_TRIES * steps):
            batches = credited(engine, credit)
            before, begin = sum(each.seconds for each in timed.values()), thread_time()
            again = sum(each.again for each in timed.values())
            engine.step()
            took = thread_time() - begin - sum(each.again for each in timed.values()) + again
            passes = sum(each.seconds for each in timed.values()) - before
            # A text that has ended leaves a step without a pass.
            if passes and all(each.looked == ((credit or 0) > 0) for each in batches):
                found.append((took - passes, passes))
            if len(found) == steps:
                break
    finally:
        vars(lib).update(known)
    return min(own for own, _ in found), min(passes for _, passes in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lm, rows = decodery.load(given.model), []
    for name in SETTINGS:
        for texts in given.texts:
            engine = started(lm, texts, name, 4000)
            seconds, passes = beside(engine, given.steps, CREDIT.get(name))
            row = {"setting": name, "texts": texts, "calls": round(calls(engine, given.steps, CREDIT.get(name)), 1)}
            row |= {"beside_us": round(1e6 * seconds, 1), "pass_us": round(1e6 * passes, 1)}
            rows.append(row)
            print(row)
    if given.out:
        write_result(given.out, {"model": given.model, "steps": given.steps, "rows": rows})


if __name__ == "__main__":
    main()
