"""What a text's keys and values take by its length where most layers see a window, given back and not.

    python benchmarks/window_memory.py --out benchmarks/results/window-memory.json

Layers as Gemma 3 270M has them: of six, five see 512 tokens and one sees all, each with 256 numbers for keys and as
many for values, in float32. They are counted on a model of six layers with random weights and multiplied to its 18.
Prompts are read in pieces of 512 tokens, and 8 more after. `there` is what the system says is in memory.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.torch.transformer import Transformer
from decodery.testing import tiny_transformer
from decodery_benchmarks.experiment import Experiment

LAYERS, TIMES, WINDOW, HEAD = 6, 3, 512, 128
PIECE, WRITTEN = 512, 8
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", nargs="*", type=int, default=(4096, 8000))
    options = parser.parse_args()

    def run(name: str) -> dict[str, Any]:
        length = int(name)
        # What one process frees lies beside what it takes next.
        with get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
            (kept, every), (given, less) = processes.starmap(read, [(length, False), (length, True)], chunksize=1)
        if every != less:
            raise SystemExit(f"behind {length} tokens logits differ where memory was given back")
        return {"kept": kept, "given back": given}

    command = "python benchmarks/window_memory.py --out benchmarks/results/window-memory.json"
    grid = {"name": [str(length) for length in options.lengths]}
    Experiment(grid, run, settings={"window": WINDOW}).measure(options.out, command)


@torch.no_grad()
def read(length: int, provides: bool) -> tuple[dict[str, int], list[list[float]]]:
    """Bytes that keys and values take in the end, and logits of what was written; gives: whether memory goes back."""
    torch.set_num_threads(1)
    base = tiny_transformer(0, num_layers=LAYERS, hidden_size=4 * HEAD, max_positions=8192, dtype=torch.float32)
    slides = tuple(layer < LAYERS - 1 for layer in range(LAYERS))
    model = Transformer(replace(base.config, sliding_window=WINDOW, sliding_layers=slides), base.weights)
    cache, most, logits = model.new_cache(), 0, []
    cache.provide(length + WRITTEN)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (length + WRITTEN,), generator=generator).tolist()
    for size in [*(min(PIECE, length - at) for at in range(0, length, PIECE)), *[1] * WRITTEN]:
        part = tokens[cache.next_position : cache.next_position + size]
        logits.append(model.forward(Batch([Segment.chunk(part, cache, logit_rows=[size - 1])])).logits)
        cache.keep(range(size))
        most = max(most, there(cache))
        if provides:
            cache.release_passed()
    figures = {"counted": cache.bytes, "there": there(cache), "there at most": most}
    return {name: TIMES * each for name, each in figures.items()}, torch.cat(logits[-WRITTEN:]).tolist()


def there(cache: KVCache) -> int:
    """Bytes of the machine's memory that the cache's pages take: their pool has a mapping of its own."""
    places = [cache.pages.pool.base]
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := MAPPING.match(line):
            begin, end = (int(each, 16) for each in mapping.groups())
            inside = any(begin <= place < end for place in places)
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


if __name__ == "__main__":
    main()
