"""Which needles are found, by the length of the text and how deep they lie, under several cache policies.

    decodery train kv double-sparsity docs/{design,searches,serving,training}.md --out runs/channels --texts 24
    python benchmarks/needle_grid.py --out benchmarks/results/needle-grid.json --channels runs/channels

A policy has a quarter of the text. Lengths that are named are measured where the file lacks them, the shortest first.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

import decodery
from decodery.llm.resolve_settings import resolve_cache_policy
from decodery_benchmarks.long_context.cases import DEPTHS
from decodery_benchmarks.long_context.measure import Bench
from decodery_benchmarks.long_context.settings import ContextSettings
from decodery_benchmarks.results import begun_result, write_result

FULL = "full"
KEPT = {FULL: "auto", "full, float16": "float16", "full, int8": "int8"}
"""What keys and values are kept in where no policy drops any."""
POLICIES = (
    *("streaming-llm:budget=0.25", "tova:budget=0.25", "snapkv:budget=0.25,window=16", "quest:budget=0.25"),
    *("actqkv:budget=0.25,block=16,window=64,sinks=4", "double-sparsity:budget=0.25"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--channels", help="What `decodery train kv double-sparsity` made; without it, that is left out."
    )
    parser.add_argument("--lengths", nargs="*", type=int, default=(500, 1000, 2000))
    parser.add_argument("--full-lengths", nargs="*", type=int, default=(4000,), help="further ones for the full cache")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = sorted({*arguments.lengths, *arguments.full_lengths})
    benches = {
        name: Bench(decodery.load("smollm2", kv_dtype=kept), ContextSettings(input_tokens=tuple(lengths)))
        for name, kept in KEPT.items()
    }
    known: dict[str, Any] = begun_result(arguments.out)
    known["command"] = (
        "python benchmarks/needle_grid.py --out benchmarks/results/needle-grid.json --channels runs/channels"
    )
    known |= {"model": "smollm2", "budget": 0.25, "depths": list(DEPTHS)}
    units = list(itertools.product(lengths, KEPT))
    units += [(length, policy) for length in sorted(arguments.lengths) for policy in POLICIES]
    for length, name in sorted(units, key=lambda unit: unit[0] if unit[1] not in KEPT else 0):
        found = known["rows"].setdefault(str(length), {})
        if name in found or (name.startswith("double") and arguments.channels is None):
            continue
        bench = benches.get(name, benches[FULL])
        spec = name + (f",calibration={arguments.channels}" if name.startswith("double") else "")
        kv = None if name in KEPT else resolve_cache_policy(spec)
        start = len(DEPTHS) * lengths.index(length)
        cases = bench.cases["needle"][start : start + len(DEPTHS)]
        with torch.no_grad():
            found[name] = {
                mode: [bench.solved(kv, case, asked) for case in cases]
                for mode, asked in (("known", True), ("unknown", False))
                if asked or name not in KEPT
            }
        print(length, name, found[name], flush=True)
        write_result(arguments.out, known)


if __name__ == "__main__":
    main()
