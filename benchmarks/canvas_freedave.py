"""FreeDave beside static decoding: whether it writes the same tokens in the same order, and in how many passes.

    python benchmarks/canvas_freedave.py DIR --letters 8 --out benchmarks/results/canvas-freedave.json
    python benchmarks/canvas_freedave.py --out benchmarks/results/canvas-freedave.json

DIR is a model of `decodery train diffusion`, in float32. Texts that differ could come of rounding alone, where a pass
over several states adds in another order than a pass over one. The second command adds models of random weights, in
float64. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import filled
from decodery.llm.llm import LLM
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import run_sync
from decodery.testing import tiny_transformer
from decodery.training.lists import LISTS, canvas_length
from decodery_benchmarks.diffusion.tasks import drawn
from decodery_benchmarks.results import begun_result, write_result

DRAFTS = (1, 2, 3, 4, 6, 8)
CACHES = (",block=HALF,cache=prefix", ",block=HALF,cache=dual")
"""Blocks are half a canvas."""
MODELS = 200
_TOGETHER = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--letters", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=50, help="of each of the ten tasks")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = begun_result(given.out)
    if given.folder:
        settings = f"--letters {given.letters} --prompts {given.prompts}"
        found["command"] = f"python benchmarks/canvas_freedave.py DIR {settings} --out {given.out}"
        found["rows"] = trained(
            decodery.load(given.folder, dtype="float32", device="cpu"), given.letters, given.prompts
        )
    else:
        found["summary"]["random"] = random_models()
    write_result(given.out, found)


def trained(lm: LLM, letters: int, count: int) -> list[dict[str, Any]]:
    """A row for each number of states and each cache."""
    items = drawn(tuple(LISTS), count, letters, 0)
    prompts, tasks, rows = (
        [each.prompt for each in items],
        np.array([each.task for each in items]),
        list[dict[str, Any]](),
    )
    references = dict[str, list[Canvas]]()
    half = str(canvas_length(tuple(LISTS), letters) // 2)
    for drafts, cache in [(drafts, "") for drafts in DRAFTS] + [(4, each.replace("HALF", half)) for each in CACHES]:
        if cache not in references:
            references[cache] = canvases(lm, f"static{cache.replace(',', ':', 1)}", prompts, letters)
        before, after = references[cache], canvases(lm, f"freedave:drafts={drafts}{cache}", prompts, letters)
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
    return rows


def random_models() -> dict[str, int]:
    """How many of these write something else, or in another order, than static decoding does; each in another setting.

    In turn: states of a pass 1 to 8, rows that predict their own token and the next one, caches none, prefix and dual.
    """
    found = {"models": MODELS, "others": 0}
    for seed in range(MODELS):
        base = tiny_transformer(seed, vocab_size=20)
        model = Transformer(replace(base.config, causal=False, mask_id=19, shifted=seed // 8 % 2 == 1), base.weights)
        cache, orders = ("none", "prefix", "dual")[seed // 16 % 3], []
        for way in ("static:", f"freedave:drafts={1 + seed % 8},"):
            canvas = Canvas.of(model, [1, 2, 3], 12, seed=seed)
            with torch.no_grad():
                run_sync(filled(model, canvas, resolve("diffusion", f"{way}block=6,cache={cache}")))
            orders.append([(each.positions.tolist(), each.tokens.tolist()) for each in canvas.rounds])
        found["others"] += orders[0] != orders[1]
    return found


def canvases(lm: LLM, method: str, prompts: list[str], letters: int) -> list[Canvas]:
    found, places = list[Canvas](), canvas_length(tuple(LISTS), letters)
    for first in range(0, len(prompts), _TOGETHER):
        engine = lm.engine()
        fills = [
            lm.fill(lm.encode(each, apply_chat_template=False), method, places)
            for each in prompts[first : first + _TOGETHER]
        ]
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
