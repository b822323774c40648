"""What a changed copy drafts from its original's keys and values of a text, and from its own.

    OMP_NUM_THREADS=1 python benchmarks/recycled.py [NAME ...]

The original is smollm2 in bfloat16, copies are rows of `transforms.py`, and prompts and lengths are the same as there.
Tokens per pass of the original with the copy drafting four at a time, and rows that the copy reads for each token
written, prompts included: with a cache of its own, and going on from what the original has kept of the text. All texts
must be the original's. Counts, no times. Writes benchmarks/results/recycled.json; rows that are there already are not
measured again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import decodery
from decodery.compression.base import transformed
from decodery.core.registry import resolve
from decodery.engine.request import Request
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery_benchmarks.experiment import Experiment
from transforms import CALIBRATION, DRAFTED, LENGTH, NEW, PIECES, PROMPTS, ROWS, pieces

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "recycled.json"
COPIES = ("int4, 3 bits", "2:4, activation", "slicegpt 0.1", "fp4, no search of biases")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to measure; all of them where none is named")
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="bfloat16")
    model = lm.model
    assert isinstance(model, Transformer)
    calibration = pieces(lm, [ROOT / "docs" / f"{name}.md" for name in CALIBRATION], LENGTH)[:PIECES]
    settings = {"prompts": len(PROMPTS), "drafted": DRAFTED, "written": NEW}

    def written(drafter: DraftModel | None) -> tuple[list[list[int]], dict[str, float]]:
        engine = lm.engine()
        found = [engine.submit(Request(lm.encode(each), max_new_tokens=NEW, drafter=drafter)) for each in PROMPTS]
        engine.run(found)
        # The first token of each text comes with its prompt.
        tokens = sum(len(seq.generated) - 1 for seq in found)
        passes = sum(not step.prefill for seq in found for step in seq.trace.steps)
        rows = sum(seq.trace.ledger.rows.get("draft", 0) for seq in found)
        return [seq.generated for seq in found], {"tokens per pass": tokens / passes, "rows per token": rows / tokens}

    plain, _ = written(None)

    def run(name: str) -> dict[str, Any]:
        copy, _ = transformed(model, [resolve("compression", spec) for spec in ROWS[name]], calibration)
        row = {}
        for how, recycled in (("own", False), ("recycled", True)):
            texts, row[how] = written(DraftModel(copy, length=DRAFTED, recycled=recycled))
            if texts != plain:
                raise SystemExit(f"drafts of {name}, {how}, change a text")
        return row

    names = args.names or COPIES
    Experiment({"name": names}, run, settings=settings).measure(OUT, "python benchmarks/recycled.py")


if __name__ == "__main__":
    main()
