"""FreeDave beside static decoding: whether it writes the same tokens in the same order, and in how many passes.

    python benchmarks/canvas_freedave.py DIR --letters 8 --out benchmarks/results/canvas-freedave.json

DIR is a model of `decodery train diffusion`, in float32. Texts that differ could come of rounding alone, where a pass
over several states adds in another order than a pass over one. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import decodery
from decodery.bench.canvases.tasks import drawn
from decodery.diffuse.canvas import Canvas
from decodery.lm import LM
from decodery.train.lists import LISTS

DRAFTS = (1, 2, 3, 4, 6, 8)
CACHES = (",block=5,cache=prefix", ",block=5,cache=dual")
_TOGETHER = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--letters", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=50, help="of each of the ten tasks")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    items = drawn(tuple(LISTS), given.prompts, given.letters, 0)
    prompts, tasks, rows = [each.prompt for each in items], np.array([each.task for each in items]), []
    lm, references = decodery.load(given.folder, dtype="float32", device="cpu"), dict[str, list[Canvas]]()
    for drafts, cache in [(drafts, "") for drafts in DRAFTS] + [(4, cache) for cache in CACHES]:
        if cache not in references:
            references[cache] = canvases(lm, f"static{cache.replace(',', ':', 1)}", prompts)
        before, after = references[cache], canvases(lm, f"freedave:drafts={drafts}{cache}", prompts)
        saved = [one.passes / other.passes for one, other in zip(before, after, strict=True)]
        rows.append({
            "drafts": drafts, "cache": cache.rpartition("=")[2], "prompts": len(items),
            "other texts": sum(one.output != other.output for one, other in zip(before, after, strict=True)),
            "other orders": sum(not in_order(one, other) for one, other in zip(before, after, strict=True)),
            "static passes": round(float(np.mean([each.passes for each in before])), 3),
            "passes": round(float(np.mean([each.passes for each in after])), 3),
            "static rows": round(float(np.mean([each.rows for each in before])), 1),
            "rows": round(float(np.mean([each.rows for each in after])), 1),
            "saved": {task: round(float(np.mean(np.array(saved)[tasks == task])), 2) for task in LISTS},
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    settings = f"--letters {given.letters} --prompts {given.prompts}"
    command = f"python benchmarks/canvas_freedave.py DIR {settings} --out {given.out}"
    given.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


def canvases(lm: LM, method: str, prompts: list[str]) -> list[Canvas]:
    found: list[Canvas] = []
    for first in range(0, len(prompts), _TOGETHER):
        engine = lm.engine()
        fills = [lm.fill(lm.encode(each, raw=True), method, 10) for each in prompts[first : first + _TOGETHER]]
        begun = [lm.begin(engine, fill) for fill in fills]
        engine.run([each.work for each in begun])
        found += [each.canvas for each in begun]
    return found


def in_order(one: Canvas, other: Canvas) -> bool:
    """Whether what the first wrote one after another, the other wrote in no other order, several at once or not."""
    start, end = one.prompt_length, one.prompt_length + len(one.output)
    order = start + np.argsort(one.written[start:end], kind="stable")
    return bool((np.diff(other.written[order]) >= 0).all())


if __name__ == "__main__":
    main()
