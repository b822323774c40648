"""What `decodery bench --workload long-context` measures, on passages of this project's documents.

    decodery train kv double-sparsity docs/{design,searches,serving,training}.md --out runs/channels --texts 24
    python benchmarks/long_context.py --out benchmarks/results/long-context.json --channels runs/channels

Counts and shares alone, no times. Policies and budgets that are named are measured anew; what the file says of the
others stays, so that an interrupted run goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.bench.contexts.bounds import Oracle, Uniform
from decodery.bench.contexts.cases import FOLLOWING, PROMPT, TEXTS
from decodery.bench.contexts.errors import Errors
from decodery.bench.contexts.measure import Bench as Measured
from decodery.bench.contexts.measure import measure
from decodery.bench.contexts.settings import NUMBERS, ORACLE, UNIFORM, spec_of
from decodery.registry import resolve

BUDGETS = (0.25, 0.1, 0.5, 1.0)
ROOT = Path(__file__).parents[1]
CALIBRATED = "double-sparsity"
SEPARATE = (
    *("streaming-llm", "h2o", "tova", "d2o", "snapkv", "pyramid-kv", "expected-attention", "dapq", "quest", "actqkv"),
    CALIBRATED,
)
BITS = dict(zip(("quantized-8", "quantized-4"), NUMBERS, strict=True))


class Bench(Measured):
    """The benchmark on passages of the documents of this project."""

    def __init__(self, lm: decodery.LM) -> None:
        pages = sorted((ROOT / "docs").glob("*.md"))
        found = [lm.tokenizer.encode(page.read_text(encoding="utf-8"), special=False)[200:] for page in pages]
        size = PROMPT + FOLLOWING
        super().__init__(lm, given=[tokens[:size] for tokens in found if len(tokens) >= size][:TEXTS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--channels", help="What `decodery train kv double-sparsity` made; without it, that is left out."
    )
    parser.add_argument("--policies", nargs="*", default=[UNIFORM, ORACLE, *SEPARATE, *BITS])
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(decodery.load("smollm2"))
    errors = Errors(bench)
    known: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"policies": {}}
    known["command"] = (
        "python benchmarks/long_context.py --out benchmarks/results/long-context.json --channels runs/channels"
    )
    known["model"] = "smollm2"
    known["tokens"] = {task: int(np.mean([len(c.document) for c in cases])) for task, cases in bench.cases.items()}
    known["full"] = bench.solved_of_all()
    for budget, name in itertools.product(arguments.budgets, arguments.policies):
        if (name in BITS and budget != 1) or (name == CALIBRATED and arguments.channels is None):
            continue
        spec = BITS.get(name) or spec_of(name, budget)
        if name == CALIBRATED:
            spec += f",calibration={arguments.channels}"
        bounds = {UNIFORM: Uniform, ORACLE: Oracle}
        kv = bounds[name](budget) if name in bounds else resolve("kv", spec)
        drafts = None if name in bounds or kv.probes else f"{spec.replace(':', '(', 1)})"
        found = measure(bench, kv, drafts=drafts, errors=None if kv.probes else errors)
        known["policies"].setdefault(name, {})[str(budget)] = found
        print(name, budget, json.dumps(found), flush=True)
        arguments.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
