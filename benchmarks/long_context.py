"""What `python benchmarks/bench.py long-context` measures, on passages of this project's documents.

    decodery train kv double-sparsity docs/{design,searches,serving,training}.md --out runs/kv/channels --texts 24
    pages="docs/inference-time-search.md docs/serving.md docs/training.md docs/sampling.md docs/supported-models.md"
    decodery train kv meta-soft $pages --out runs/kv/meta-soft --texts 48 --length 192 --steps 120
    decodery train kv lserve $pages --out runs/kv/gates --texts 32 --length 128 --steps 90
    decodery train kv write-gate $pages --out runs/kv/write-gate --texts 32 --length 128 --steps 90
    decodery train kv coprocessor $pages --out runs/kv/coprocessor --texts 32 --length 128 --steps 90
    python benchmarks/long_context.py --out benchmarks/results/long-context.json --parts runs/kv

Counts and shares alone, no times. The passages are tokens 200 to 520 of five pages, kept in benchmarks/texts as they
were when the first policy was measured, so that rows of other days compare. Policies and budgets that are named are
measured anew; what the file says of the others stays, so that an interrupted run goes on with those that are missing.
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
from decodery.core.registry import resolve
from decodery_benchmarks.long_context.bounds import Oracle, Uniform
from decodery_benchmarks.long_context.errors import Errors
from decodery_benchmarks.long_context.measure import Bench as Measured
from decodery_benchmarks.long_context.measure import measure
from decodery_benchmarks.long_context.settings import NUMBERS, ORACLE, UNIFORM, spec_of
from decodery_benchmarks.results import begun_result, write_result

BUDGETS = (0.25, 0.1, 0.5, 1.0)
PASSAGES = Path(__file__).parent / "texts" / "passages.json"
SEPARATE = (
    "streaming-llm",
    "h2o",
    "tova",
    "d2o",
    "snapkv",
    "pyramid-kv",
    "expected-attention",
    "dapq",
    "quest",
    "actqkv",
)
TRAINED = {
    "double-sparsity": "double-sparsity:budget={},calibration=PARTS/channels",
    "lserve": "lserve:budget={},window={},sinks=4,page=16,logical=8,least=1,gates=PARTS/gates",
    "meta-soft": "meta-soft:budget={},trained=PARTS/meta-soft",
    "write-gate": "write-gate:budget={},gate=PARTS/write-gate",
    "coprocessor": "coprocessor:trained=PARTS/coprocessor",
}
"""What needs a part that `decodery train kv` makes; pages and windows suit some hundred tokens."""
ONCE = dict(zip(("quantized-8", "quantized-4"), NUMBERS, strict=True)) | {"coprocessor": TRAINED["coprocessor"]}
"""What has no budget."""


class Bench(Measured):
    """The benchmark on passages of the documents of this project."""

    def __init__(self, lm: decodery.LLM) -> None:
        super().__init__(lm, given=list(json.loads(PASSAGES.read_text(encoding="utf-8")).values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", help="The folder of what was trained; without it, what needs that is left out.")
    parser.add_argument(
        "--policies", nargs="*", default=[UNIFORM, ORACLE, *SEPARATE, *dict.fromkeys([*TRAINED, *ONCE])]
    )
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(decodery.load("smollm2"))
    errors = Errors(bench)
    known: dict[str, Any] = begun_result(arguments.out)
    known["command"] = "python benchmarks/long_context.py --out benchmarks/results/long-context.json --parts runs/kv"
    known["model"] = "smollm2"
    known["tokens"] = {task: int(np.mean([len(c.document) for c in cases])) for task, cases in bench.cases.items()}
    known["full"] = bench.solved_of_all()
    bounds = {UNIFORM: Uniform, ORACLE: Oracle}
    for budget, name in itertools.product(arguments.budgets, arguments.policies):
        if (name in ONCE and budget != 1) or (name in TRAINED and arguments.parts is None):
            continue
        spec = spec_of(ONCE.get(name) or TRAINED.get(name, name), budget).replace("PARTS", arguments.parts or "")
        kv = bounds[name](budget) if name in bounds else resolve("cache-policy", spec)
        drafts = None if name in bounds or kv.probes else f"{spec.replace(':', '(', 1)})"
        found = measure(bench, kv, drafts=drafts, errors=None if kv.probes else errors)
        known["rows"].setdefault(name, {})[str(budget)] = found
        print(name, budget, json.dumps(found), flush=True)
        write_result(arguments.out, known, summary=["full"])


if __name__ == "__main__":
    main()
