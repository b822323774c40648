"""What a pass of each draft takes beside one of its target, on the pairs that benchmarks/draft/joint.py compares.

    OMP_NUM_THREADS=1 python benchmarks/draft/steps.py [PAIR ...] [--rounds 100]

PAIR: `smollm2-int8`, `smollm2-int4`, `chain`, `hybrid` and `sharing`. What a pass takes does not hang on what was
learned: drafts of the shapes that are trained for the table are cut from their targets and left as they are, and
hybrids are random. After 64 tokens, one row for drafts that write token by token, a block for block drafters; of the
target one row, and the rows that check four tokens and twelve. Passes of all are timed in turns, and the least of
`rounds` counts, which company on the machine disturbs least. Writes benchmarks/results/draft-steps.json.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import small
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.speculative.drafters.deer import block_segment
from decodery.training.cut import DraftShape, cut_draft, keep_tokens, quantized
from decodery.training.deer import with_mask
from decodery.training.draft import check_target

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks import solvers
from decodery_benchmarks.experiment import Experiment

RESULTS = Path(__file__).parents[1] / "results" / "draft-steps.json"
BEFORE = 64

Pass = Callable[[], float]
"""Runs one pass and returns the seconds it took."""


def passing(model: LanguageModel, rows: int = 1, layer_plan: LayerPlan | None = None) -> Pass:
    cache = behind(model)

    def run() -> float:
        segment = Segment.chunk(np.arange(rows) % 40, cache)
        begin = perf_counter()
        model.forward(Batch([segment]), **({} if layer_plan is None else {"layer_plan": layer_plan}))
        taken = perf_counter() - begin
        cache.truncate(BEFORE)
        return taken

    return run


def block(model: LanguageModel, length: int) -> Pass:
    cache, mask = behind(model), model.config.mask_id
    assert mask is not None

    def run() -> float:
        segment = block_segment([1], length, mask, cache)
        begin = perf_counter()
        model.forward(Batch([segment]))
        taken = perf_counter() - begin
        cache.truncate(BEFORE)
        return taken

    return run


def behind(model: LanguageModel) -> Any:
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(np.arange(BEFORE) % 40, cache, logit_rows=[BEFORE - 1])]))
    cache.keep(range(BEFORE))
    return cache


def of_target(model: LanguageModel) -> dict[str, Pass]:
    return {f"target, {rows} rows": passing(model, rows) for rows in (1, 5, 13)}


def cut(name: str, dtype: str, draft: str | None, deep: DraftShape, blocks: DraftShape) -> dict[str, Pass]:
    """deep: of the nested draft, which easyspec runs several layers at a time; blocks: of the block drafter."""
    loaded = solvers.load_model(name, dtype=dtype)
    target = check_target(solvers.load_model(name, dtype="int8" if dtype == "int4" else dtype))

    def made(shape: DraftShape) -> Any:
        return cut_draft(target, shape, keep_tokens([], shape.tokens, target, target.config.eos_ids))

    nested = quantized(made(deep))
    masked = quantized(with_mask(made(blocks), 8))
    own = load(draft).model if draft else quantized(made(DraftShape(1, deep.inner, deep.tokens)))
    found = of_target(loaded.model) | {"draft-model": passing(own), "draft-model, 4 rows": passing(own, 4)}
    found |= {
        f"nested, up to layer {layers}": passing(nested, 1, LayerPlan(tuple(range(layers)))) for layers in deep.exits
    }
    found["easyspec of all its layers, 2 at a time"] = passing(nested, 1, LayerPlan(abreast=2))
    found["network of deer, one row"] = passing(masked)
    return found | {f"deer, a block of {length}": block(masked, length) for length in (4, 8)}


def recurrent(name: str) -> dict[str, Pass]:
    target, draft = (small.pair(Path(), each, trained=False) for each in (name, "recurrent"))
    return of_target(target) | {"draft-model": passing(draft), "draft-model, 3 rows": passing(draft, 3)}


def smollm2(dtype: str) -> dict[str, Pass]:
    return cut("smollm2", dtype, "smollm2-draft", DraftShape(4, 768, 3072, exits=(1, 2, 4)), DraftShape(2, 768, 3072))


PAIRS: dict[str, Callable[[], dict[str, Pass]]] = {
    "smollm2-int8": lambda: smollm2("int8"),
    "smollm2-int4": lambda: smollm2("int4"),
    "chain": lambda: cut(small.TARGET, "auto", None, DraftShape(3, 352, exits=small.EXITS), DraftShape(2, 352)),
    "hybrid": lambda: recurrent("hybrid"),
    "sharing": lambda: recurrent("sharing"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="*", choices=[[], *PAIRS], metavar="PAIR", help=", ".join(PAIRS))
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()

    def run(name: str) -> dict[str, float]:
        passes = PAIRS[name]()
        least = dict.fromkeys(passes, float("inf"))
        with torch.no_grad():
            for _ in range(options.rounds):
                for each, timed in passes.items():
                    least[each] = min(least[each], timed())
        return {each: round(1e3 * taken, 4) for each, taken in least.items()}

    command = f"OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}"
    Experiment({"name": list(options.pairs or PAIRS)}, run).measure(RESULTS, command)


if __name__ == "__main__":
    main()
