"""What a pass costs after texts of many lengths, with keys and values in float32 and in float16.

    python benchmarks/kernels/lengths.py --json benchmarks/results/lengths.json

Every round times each kind of pass once, so that what the machine does meanwhile touches all of them; the least of all
rounds is told, those of earlier runs in the file among them, and ratios are of these. What stands before the rows is a
short text's keys and values, over and over: what they say changes no time. `reads`: what the machine reads in order, in
GB/s. Needs a quiet machine and half a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import decodery
from decodery.core.native import kernels
from decodery.models.batch import Batch, Segment

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import begun_result, write_result

DTYPES = ("float32", "float16", "int8")
CONTEXTS = (128, 1024, 4096, 8000)
ROWS = (1, 8)
PIECE = 512


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 40_000, size=PIECE).tolist()
    texts = {}
    for kept in DTYPES:
        # Float32 is what there is without a word.
        model = decodery.load("smollm2", dtype="int8", kv_dtype="auto" if kept == "float32" else kept).model
        read = model.new_cache()
        model.forward(Batch([Segment.chunk(tokens, read, logit_rows=[])]))
        read.keep(range(PIECE))
        piece = read.data[:, :, :, :PIECE]
        for context in CONTEXTS:
            cache = model.new_cache()
            cache.prepend(piece.repeat(1, 1, 1, -(-context // PIECE), 1)[:, :, :, :context])
            texts[kept, context] = model, cache
    known = begun_result(options.json) if options.json else {"rounds": 0, "rows": []}
    least = {(row["keys"], row["context"], row["rows"]): row["ms"] / 1e3 for row in known["rows"]}
    for _ in range(options.rounds):
        for (kept, context), (model, cache) in texts.items():
            for rows in ROWS:
                begin = perf_counter()
                model.forward(Batch([Segment.chunk(tokens[:rows], cache)]))
                took = perf_counter() - begin
                least[kept, context, rows] = min(took, least.get((kept, context, rows), took))
                cache.keep([])
    found = []
    for (kept, context, rows), took in least.items():
        ratios = {
            "of the shortest": round(took / least[kept, CONTEXTS[0], rows], 3),
            "of one row": round(took / least[kept, context, 1], 3),
        }
        found.append({"keys": kept, "context": context, "rows": rows, "ms": round(1e3 * took, 3), **ratios})
        print(", ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    if options.json:
        command = "python benchmarks/kernels/lengths.py --json benchmarks/results/lengths.json"
        result = {"command": command, "reads": round(kernels.read_bandwidth(), 2)}
        result |= {"rounds": known.get("rounds", 0) + options.rounds, "rows": found}
        write_result(options.json, result, summary=["reads"])


if __name__ == "__main__":
    main()
