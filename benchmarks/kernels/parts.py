"""Where the time of an int8 pass goes: matrix products, attention, and all else, by rows and length of the text.

    python benchmarks/kernels/parts.py --json benchmarks/results/parts.json

The kernels count the ticks that their first thread spends in every kind of work; time it waits for the others is
counted apart. What the whole pass takes beyond the kernels is Python and PyTorch.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import decodery
from decodery.core.native import kernels
from decodery.models.batch import Batch, Segment

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

STAGES = ("norms", "products", "rope", "attention", "waiting")
ROWS = (1, 8, 16, 64)
CONTEXTS = (128, 1024, 4096, 8000)


class Watched:
    """The kernels' two entry points, timed. ticks: of the last call's stages; seconds: of the last calls."""

    def __init__(self) -> None:
        library = kernels.library()
        if library is None:
            raise SystemExit("the native kernels are not built here, so there is nothing to look into")
        self.ticks = (ctypes.c_int64 * len(STAGES))()
        self.seconds = {"layers": 0.0, "head": 0.0}
        layers, head = library.decodery_layers, library.decodery_head

        def watched_layers(model: int, step: int, _: None) -> int:
            ctypes.memset(self.ticks, 0, ctypes.sizeof(self.ticks))
            begin = perf_counter()
            code = layers(model, step, ctypes.addressof(self.ticks))
            self.seconds["layers"] = perf_counter() - begin
            return code

        def watched_head(*arguments: int) -> int:
            begin = perf_counter()
            code = head(*arguments)
            self.seconds["head"] = perf_counter() - begin
            return code

        library.decodery_layers, library.decodery_head = watched_layers, watched_head


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = decodery.load("smollm2", dtype="int8").model
    watched = Watched()
    rows = [measure(model, watched, n, context, options.rounds) for context in CONTEXTS for n in ROWS]
    for row in rows:
        print(", ".join(f"{name} {value:g}" for name, value in row.items()))
    if options.json:
        write_result(options.json, {"rows": rows})


def measure(model: object, watched: Watched, n: int, context: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of one kind of pass and the shares of its parts; the head is products too."""
    tokens = np.random.default_rng(0).integers(0, 40_000, size=context)
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
    cache.keep(range(context))
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        begin = perf_counter()
        model.forward(Batch([Segment.chunk(tokens[:n], cache)]))
        whole = perf_counter() - begin
        cache.keep([])
        layers, head, ticks = watched.seconds["layers"], watched.seconds["head"], list(watched.ticks)
        parts = {name: layers / whole * count / sum(ticks) for name, count in zip(STAGES, ticks, strict=True)}
        parts["products"] += head / whole
        found.append({"ms": whole * 1e3, **parts, "outside the kernels": 1 - (layers + head) / whole})
    middle = {name: round(statistics.median(each[name] for each in found), 4) for name in found[0]}
    return {"rows": n, "context": context, **middle, "outside products": round(1 - middle["products"], 4)}


if __name__ == "__main__":
    main()
