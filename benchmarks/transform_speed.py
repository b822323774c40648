"""What changed copies of a model are worth by the clock: in its place, and drafting for it.

    OMP_NUM_THREADS=1 python benchmarks/transform_speed.py [NAME ...]

Wants a machine that does nothing else. The original is smollm2 in bfloat16; copies are rows of `transforms.py`, and the
prompts the first three of that file. Greedy texts of 32 tokens, one after the other; a turn writes all of them with the
original alone, with each copy in its place, and with each copy drafting four tokens at a time from the original's keys
and values (from its own, where those of both are kept otherwise). alone, drafting: tokens a second as a multiple of the
original's in the same turn, the median of turns, and the least and the most. Drafted texts must be the original's.
Writes benchmarks/results/transform-speed.json; rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np

import decodery
from decodery.compression.base import transformed
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery_benchmarks.experiment import Experiment
from transforms import CALIBRATION, DRAFTED, LENGTH, PIECES, PROMPTS, ROOT, ROWS, pieces

OUT = ROOT / "benchmarks" / "results" / "transform-speed.json"
NEW, ASKED = 32, 3
NAMES = (
    "int8", "int4", "int4, 3 bits", "fp4, no search of biases", "ternary, untrained", "2:4, magnitude",
    "slicegpt 0.2",
)  # fmt: skip


def written(lm: LLM, drafter: DraftModel | None) -> tuple[float, list[list[int]]]:
    """Tokens a second of all texts, and the texts."""
    begun = perf_counter()
    texts = [lm.generate(each, max_new_tokens=NEW, drafter=drafter).tokens for each in PROMPTS[:ASKED]]
    return sum(map(len, texts)) / (perf_counter() - begun), texts


def drafter_of(lm: LLM, copy: Transformer) -> DraftModel:
    """One that goes on from what the original keeps, where the copy can."""
    drafter = DraftModel(copy, length=DRAFTED, recycled=True)
    try:
        lm.generate(PROMPTS[0], max_new_tokens=2, drafter=drafter)
    except SettingsError:
        return DraftModel(copy, length=DRAFTED)
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="rows to measure")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="bfloat16")
    model = lm.model
    assert isinstance(model, Transformer)
    calibration = pieces(lm, [ROOT / "docs" / f"{name}.md" for name in CALIBRATION], LENGTH)[:PIECES]
    _, plain = written(lm, None)

    def run(name: str) -> dict[str, Any]:
        copy, _ = transformed(model, [resolve("compression", spec) for spec in ROWS[name]], calibration)
        alone = LLM(LoadedModel(copy, lm.tokenizer, lm.chat_template, name, "bfloat16"))
        drafter = drafter_of(lm, copy)
        ratios: dict[str, list[float]] = {"alone": [], "drafting": []}
        written(alone, None)
        for _ in range(args.turns):
            base, _ = written(lm, None)
            ratios["alone"].append(written(alone, None)[0] / base)
            rate, texts = written(lm, drafter)
            if texts != plain:
                raise SystemExit(f"drafts of {name} change a text")
            ratios["drafting"].append(rate / base)
        row: dict[str, Any] = {how: [float(np.median(each)), min(each), max(each)] for how, each in ratios.items()}
        return row | {"recycled": drafter.recycled}

    command, settings = "OMP_NUM_THREADS=1 python benchmarks/transform_speed.py", {"turns": args.turns, "written": NEW}
    Experiment({"name": args.names}, run, settings=settings).measure(OUT, command)


if __name__ == "__main__":
    main()
