"""What a pass costs on a CUDA device by its number of rows: replayed as one graph, and launched kernel by kernel.

    python benchmarks/gpu_step.py --out benchmarks/results/gpu-step.json

Passes of both kinds alternate. Beside their time stands the rate at which they read the weights, as a share of the
device's own copy bandwidth (bytes read and written by a copy on the device, the better of before and after).
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.bench.passes import ROWS, rows_of
from decodery.bench.result import FORMAT, PASSES, dump, write
from decodery.budget.cost import time_passes
from decodery.budget.machine import describe
from decodery.model.footprint import precision, weight_bytes
from decodery.model.transformer import Transformer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu-step.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here, so nothing was measured: run this on a machine with one", file=sys.stderr)
        return 1
    lm = decodery.load(options.model, dtype=options.dtype, device="cuda")
    if not isinstance(lm.model, Transformer):
        print(f"{options.model} runs through transformers, which has no graphs: give another model", file=sys.stderr)
        return 1
    result = measure(lm.model, lm.name, options.context, options.repeats)
    write(options.out, dump(result))
    for row in result["rows"]:
        print(f"{row['precision']:>20} {row['rows']:3} rows {row['ms']:8.3f} ms {row['bandwidth_share']:6.1%}")
    return 0


def measure(model: Transformer, name: str, context: int, repeats: int) -> dict[str, Any]:
    """The result file's object: `read_gb_per_s` is the copy bandwidth, `precision` says how the pass ran as well."""
    eager = Transformer(model.config, model.weights)
    eager.static = None
    kinds = {f"{precision(model)}, {kind}": each for kind, each in (("graph", model), ("eager", eager))}
    bandwidth, size = copy_bandwidth(model.device), weight_bytes(model)
    timings = time_passes(kinds, ROWS, context=context, enough=lambda done: done >= repeats)
    bandwidth = max(bandwidth, copy_bandwidth(model.device))
    rows = [row for kind, by_rows in timings.items() for row in rows_of(kind, by_rows, size, bandwidth)]
    return {
        "format": FORMAT,
        "kind": PASSES,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
        "model": {"name": name, "device": str(model.device), "weight_bytes": size},
        "context": context,
        "repeats": repeats,
        "read_gb_per_s": round(bandwidth, 2),
        "rows": rows,
    }


def copy_bandwidth(device: torch.device) -> float:
    """GB/s (1e9 bytes read and written per second) of a copy on the device, the median of 20."""
    source = torch.rand(2**28, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(23):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / float(np.median(times[3:])) / 1e9


if __name__ == "__main__":
    sys.exit(main())
