"""How good a draft of itself a model is when its attention is dialled towards blocks.

    OMP_NUM_THREADS=1 python benchmarks/localist.py

smollm2 in int8 writes after texts of benchmarks/texts, greedily, and drafts four tokens at a time under `localist`,
with several dials. Tokens per pass of the model itself (1 to 5), and which share of the keys a drafted row reads. All
texts must be the same. Counts, no times. Writes benchmarks/results/localist.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import decodery
from decodery.kv_cache.localist import Localist
from decodery_benchmarks.experiment import Experiment

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "localist.json"
DIALS = (0.0, 0.6, 0.9, 0.99, 1.0)
LENGTH = 4


def share(method: Localist, first: int, count: int) -> float:
    """Of the keys before them, what `count` rows from position `first` on read, their own block and sinks included."""
    if method.dial < 1:
        return 1.0
    places = np.arange(first, first + count)
    begins = places // method.block * method.block
    return float(((places - begins + 1 + np.minimum(method.sinks, begins)) / (places + 1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens written")
    parser.add_argument("--texts", type=int, default=1)
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="int8")
    files = sorted((ROOT / "benchmarks" / "texts").glob("*.txt"))[: args.texts]
    prompts = [lm.tokenizer.encode(file.read_text(encoding="utf-8"))[: args.prompt] for file in files]

    def written(drafter: str | None) -> tuple[list[list[int]], float]:
        engine = lm.engine()
        settings = {"max_new_tokens": args.new, "drafter": drafter, "ignore_eos": True}
        found = [engine.submit(lm.request(prompt, **settings)) for prompt in prompts]
        engine.run(found)
        passes = sum(not step.prefill for seq in found for step in seq.trace.steps)
        # The first token of each text comes with its prompt.
        return [seq.generated for seq in found], (len(found) * (args.new - 1)) / passes

    plain, _ = written(None)
    cells = {
        f"dial {dial:g}, blocks of {block}": (dial, block)
        for dial, block in [*((each, 64) for each in DIALS), (1.0, 16)]
    }

    def run(name: str) -> dict[str, Any]:
        dial, block = cells[name]
        texts, rate = written(f"compressed-cache:length={LENGTH},cache_policy=localist(dial={dial},block={block})")
        if texts != plain:
            raise SystemExit(f"drafts with a dial of {dial} change the text")
        return {"tokens per pass": rate, "read": share(Localist(dial, block), args.prompt, args.new)}

    settings = {"texts": len(prompts), "prompt": args.prompt, "new": args.new}
    Experiment({"name": list(cells)}, run, settings=settings).measure(OUT, "python benchmarks/localist.py")


if __name__ == "__main__":
    main()
