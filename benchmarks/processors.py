"""What one visited node costs under every processor, by the length of the text before it: milliseconds, on one thread.

    python benchmarks/processors.py [--repeats 50] [--out benchmarks/results/processors.json]

A node is a law, a draw from it and the state after the drawn token; logits are random, over SmolLM2's vocabulary. The
median of the repetitions is given, and what plain sampling takes is the row "none".
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from decodery.sampling import (
    DRY,
    XTC,
    FrequencyPenalty,
    LogitsProcessor,
    Mirostat,
    Momentum,
    NoRepeatNGram,
    RepetitionPenalty,
    Sampler,
    TopH,
    TopK,
    TopP,
)
from decodery_benchmarks.results import write_result

VOCAB = 49_152
LENGTHS = (100, 1000, 8000)
WARPS: dict[str, list[LogitsProcessor]] = {
    "none": [],
    "top-k 50": [TopK(50)],
    "top-p 0.9": [TopP(0.9)],
    "top-h 0.4": [TopH(0.4)],
    "xtc": [XTC(1.0)],
    "mirostat 1": [Mirostat(version=1)],
    "mirostat 2": [Mirostat(version=2)],
    "repetition penalty": [RepetitionPenalty(1.2)],
    "frequency penalty": [FrequencyPenalty(0.5)],
    "no-repeat-ngram 3": [NoRepeatNGram(3)],
    "dry": [DRY()],
    "momentum": [Momentum()],
}


def milliseconds(sampler: Sampler, text: list[int], repeats: int) -> float:
    """The median time of a node after `text`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(repeats, VOCAB, generator=generator) * 3
    context = sampler.context(text, len(text), sampler.init(text), 1)
    times = []
    for row in rows:
        begin = perf_counter()
        law = sampler.law(row[None], [context])
        token = int(sampler.pick(law, 1, [context.position])[0])
        context = sampler.extend(context, token, row)
        times.append(perf_counter() - begin)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/processors.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    # As frequent as words are: the commonest token makes up a tenth of the text.
    text = (np.random.default_rng(0).zipf(1.2, max(LENGTHS)) % VOCAB).tolist()
    found = {
        name: {str(n): round(milliseconds(Sampler(processors), text[:n], options.repeats), 3) for n in LENGTHS}
        for name, processors in WARPS.items()
    }
    result = {
        "command": "python benchmarks/processors.py",
        "vocabulary": VOCAB,
        "milliseconds": found,
    }
    write_result(options.out, result, summary=["milliseconds"])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
