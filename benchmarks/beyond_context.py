"""How well a model foretells a text that goes on beyond its context, with all of its cache and under streaming-llm.

    python benchmarks/beyond_context.py --data ../shared/data --out benchmarks/results/beyond-context.json

Text: the passages of Spec-Bench's summarization and retrieval questions, one after the other. Perplexities by stretches
of it, and what the caches hold in the end; no times.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import decodery
from decodery.llm.llm import LLM
from decodery.llm.resolve_settings import resolve_cache_policy
from decodery.models.batch import Batch, Segment
from decodery_benchmarks.experiment import Experiment

STRETCH, CHUNK = 2048, 256
WAYS = ("none", "streaming-llm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10240)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm = decodery.load("smollm2")
    tokens = text(lm, options.data)[: options.tokens + 1]
    if len(tokens) <= options.tokens:
        raise SystemExit(f"the passages have {len(tokens)} tokens: ask for fewer than that by --tokens")
    settings = {"model": "smollm2", "context": lm.model.config.max_positions, "stretch": STRETCH}
    command = "python benchmarks/beyond_context.py --data ../shared/data --out benchmarks/results/beyond-context.json"
    Experiment({"name": WAYS}, lambda name: read(lm, name, tokens), settings=settings).measure(options.out, command)


def text(lm: LLM, data: Path) -> list[int]:
    """The passages people ask about, after what begins a text."""
    questions = [json.loads(line) for line in (data / "spec_bench_dev.jsonl").open(encoding="utf-8")]
    passages = [each["turns"][0] for each in questions if each["category"] in ("summarization", "rag")]
    return lm.tokenizer.encode("") + lm.tokenizer.encode("\n\n".join(passages), special=False)


@torch.no_grad()
def read(lm: LLM, way: str, tokens: list[int]) -> dict[str, Any]:
    """Perplexity of every stretch of a text [n + 1], and tokens that the cache holds in a layer in the end."""
    kv = resolve_cache_policy(way)
    cache = (lm.model if kv is None else kv.over(lm.model, 1)).new_cache()
    losses = list[torch.Tensor]()
    for start in track(range(0, len(tokens) - 1, CHUNK), description=way):
        part = tokens[start : start + CHUNK]
        part = part[: len(tokens) - 1 - start]
        logits = lm.model.forward(Batch([Segment.chunk(part, cache, logit_rows=range(len(part)))])).logits
        cache.keep(range(len(part)))
        after = torch.tensor(tokens[start + 1 : start + 1 + len(part)])
        losses.append(torch.nn.functional.cross_entropy(logits, after, reduction="none"))
    found = torch.cat(losses).split(STRETCH)
    return {"perplexity": [round(math.exp(float(each.mean())), 2) for each in found], "held": cache.length}


if __name__ == "__main__":
    main()
