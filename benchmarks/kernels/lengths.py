"""What a pass costs behind texts of many lengths, with keys and values in float32 and in float16.

    python benchmarks/kernels/lengths.py --json benchmarks/results/lengths.json

Every round times each kind of pass once, so that what the machine does meanwhile touches all of them; ratios are of the
same round, and their medians are told. Needs a quiet machine and two minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

import decodery
from decodery.budget.machine import describe
from decodery.model.batch import Batch, Segment

DTYPES = ("float32", "float16")
CONTEXTS = (128, 1024, 4096, 8000)
ROWS = (1, 8)
PIECE = 512


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 40_000, size=max(CONTEXTS)).tolist()
    texts = {}
    for kept in DTYPES:
        # Float32 is what there is without a word.
        model = decodery.load("smollm2", dtype="int8", kv_dtype="auto" if kept == "float32" else kept).model
        for context in CONTEXTS:
            cache = model.new_cache()
            for at in range(0, context, PIECE):
                part = tokens[at : min(at + PIECE, context)]
                model.forward(Batch([Segment.chunk(part, cache, logit_rows=[])]))
                cache.keep(range(len(part)))
            texts[kept, context] = model, cache
    times: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(options.rounds):
        for (kept, context), (model, cache) in texts.items():
            for rows in ROWS:
                begin = perf_counter()
                model.forward(Batch([Segment.chunk(tokens[:rows], cache)]))
                times.setdefault((kept, context, rows), []).append(perf_counter() - begin)
                cache.keep([])
    found = []
    for (kept, context, rows), each in times.items():
        first, one = (
            median(ours / theirs for ours, theirs in zip(each, times[other], strict=True))
            for other in ((kept, CONTEXTS[0], rows), (kept, context, 1))
        )
        found.append(
            {"keys": kept, "context": context, "rows": rows, "ms": round(1e3 * median(each), 3)}
            | {"of the shortest": round(first, 3), "of one row": round(one, 3)}
        )
        print(", ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    if options.json:
        command = "python benchmarks/kernels/lengths.py --json benchmarks/results/lengths.json"
        options.json.write_text(json.dumps({"command": command, "machine": describe(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
