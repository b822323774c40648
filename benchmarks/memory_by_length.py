"""What a text's keys and values take in memory by its length, under several cache policies.

    python benchmarks/memory_by_length.py --out benchmarks/results/memory-by-length.json

Bytes follow from shapes: counted on a model with random weights of 3 layers and 2 key-value heads of 64, and multiplied
to the embedded model's 30 layers and 3 such heads. The prompt is read in pieces of 512 tokens, and 8 more after it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from decodery.llm.resolve_settings import resolve_cache_policy
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.step.cache_policy import CachePolicy
from decodery.testing import tiny_transformer
from decodery_benchmarks.experiment import Experiment

LAYERS, TIMES = 3, 15
PIECE, WRITTEN = 512, 8
POLICIES = (
    *("none", "streaming-llm", "h2o:budget=0.25", "tova:budget=0.25", "snapkv:budget=0.25"),
    *("pyramid-kv:budget=0.25", "expected-attention:budget=0.25", "quest:budget=0.25", "quantized", "quantized:bits=4"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", nargs="*", type=int, default=(1024, 4096, 8000))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_transformer(0, num_layers=LAYERS, hidden_size=256, max_positions=8192, dtype=torch.float32)

    def run(name: str) -> dict[str, Any]:
        return {
            str(length): [TIMES * each for each in taken(model, resolve_cache_policy(name), length)]
            for length in options.lengths
        }

    command = "python benchmarks/memory_by_length.py --out benchmarks/results/memory-by-length.json"
    Experiment({"name": POLICIES}, run, settings={"model": "smollm2"}).measure(options.out, command)


@torch.no_grad()
def taken(model: Transformer, kv: CachePolicy | None, length: int) -> tuple[int, int]:
    """Bytes that keys and values take once all is read, and the most that they took on the way."""
    cache = (model if kv is None else kv.over(model, length)).new_cache()
    cache.provide(cache.room_for(length))
    tokens, most = torch.randint(0, model.vocab_size, (length + WRITTEN,)).tolist(), 0
    sizes = [*(min(PIECE, length - at) for at in range(0, length, PIECE)), *[1] * WRITTEN]
    for size in sizes:
        part = tokens[cache.next_position : cache.next_position + size]
        model.forward(Batch([Segment.chunk(part, cache, logit_rows=[])]))
        most = max(most, cache.bytes)
        cache.keep(range(size))
    return cache.bytes, most


if __name__ == "__main__":
    main()
