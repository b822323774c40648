"""What pruning tokens costs: the perplexity of text that is read pruned, and of what follows it.

    OMP_NUM_THREADS=1 python benchmarks/pruning.py [DIR ...] [--texts 4] [--read 160] [--after 32]

Text: passages of Spec-Bench (DECODERY_DATA) that are long enough. Each is read as a prompt with its tokens routed
around layers, and what follows it through all layers. At every sparsity: tokens drawn at random, the static router with
the same share in all layers but the first and the last, the static router and the trained one of each DIR, made by
`decodery train ftp`, and whole layers left out by all tokens, those first that turn the states least (ShortGPT).
Writes benchmarks/results/pruning.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import decodery
from decodery.llm.llm import LLM
from decodery.logits_sources.ftp import Pruned
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.models.trained.token_routers import TokenRouters, uniform
from decodery.step.forward_request import run_sync, score
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parent / "results"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
SPARSITIES = (0.1, 0.2, 0.3)
SINKS = 4


@dataclass(frozen=True, eq=False)
class AtRandom(TokenRouters):
    """As many tokens as the static router skips, whichever they are."""

    def skips(self, layer: int, importance: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        return super().skips(layer, torch.rand(len(importance), generator=torch.Generator().manual_seed(layer)), free)


Loss = tuple[float, float, float]
"""Nats per token of text that is read and of what follows it, and the share of layers left out in reading."""


def losses(logits: torch.Tensor, text: np.ndarray, read: int) -> tuple[float, float]:
    each = -logits[:-1].double().log_softmax(dim=-1)[range(len(text) - 1), text[1:]]
    return float(each[: read - 1].mean()), float(each[read - 1 :].mean())


def pruned(model: LanguageModel, routers: TokenRouters, text: np.ndarray, read: int) -> Loss:
    reader = Pruned(model, routers, SINKS, tuple(text[:read].tolist()))
    cache = reader.new_cache()
    logits = run_sync(score(reader, Segment.chunk(text, cache))).logits
    cache.keep(range(len(text)))
    held = cache.lengths.sum() - len(cache.lengths) * (len(text) - read)
    return *losses(logits, text, read), float(1 - held / (len(cache.lengths) * read))


def without(model: LanguageModel, layers: frozenset[int], text: np.ndarray, read: int) -> Loss:
    kept = tuple(layer for layer in range(model.config.num_layers) if layer not in layers)
    logits = model.forward(Batch([Segment.chunk(text, model.new_cache())]), layer_plan=LayerPlan(kept)).logits
    return *losses(logits, text, read), len(layers) / model.config.num_layers


def turning(model: LanguageModel, texts: list[np.ndarray]) -> list[int]:
    """The layers between the first and the last, those first whose input and output are most alike."""
    layers, alike = model.config.num_layers, torch.zeros(model.config.num_layers, dtype=torch.float64)
    for text in texts:
        taps = tuple(range(layers + 1))
        hidden = model.forward(Batch([Segment.chunk(text, model.new_cache(), logit_rows=[])]), taps=taps).hidden
        pairs = [(hidden[layer].double(), hidden[layer + 1].double()) for layer in range(layers)]
        alike += torch.stack([torch.cosine_similarity(*pair, dim=-1).mean() for pair in pairs])
    return [layer for layer in alike.argsort(descending=True).tolist() if 0 < layer < layers - 1]


def passages(lm: LLM, count: int, tokens: int) -> list[np.ndarray]:
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    found = [np.array(lm.tokenizer.encode(json.loads(line)["turns"][0], special=False)) for line in lines]
    long = [ids[:tokens] for ids in found if len(ids) >= tokens]
    return long[:: max(1, len(long) // count)][:count]


def mean(measure: Callable[[np.ndarray], Loss], texts: list[np.ndarray]) -> dict[str, float]:
    read, behind, share = np.mean([measure(text) for text in texts], axis=0).tolist()
    return {"sparsity": round(share, 3), "read": round(math.exp(read), 2), "behind": round(math.exp(behind), 2)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--read", type=int, default=160)
    parser.add_argument("--behind", type=int, default=32)
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    model, layers, read = lm.model, lm.model.config.num_layers, options.read
    texts = passages(lm, options.texts, read + options.behind)
    least = turning(model, texts)
    trained = [TokenRouters.load(folder / TokenRouters.FILE) for folder in options.folders]
    runs = {"whole model": mean(lambda text: without(model, frozenset(), text, read), texts)}
    for sparsity in SPARSITIES:
        contenders: dict[str, TokenRouters] = {
            "random": AtRandom(uniform(layers, sparsity)),
            "static, same share": TokenRouters(uniform(layers, sparsity)),
        }
        for routers in trained:
            if abs(routers.sparsity - sparsity) < 1e-6:
                contenders["static, shares searched"] = TokenRouters(routers.schedule)
                contenders["dynamic"] = routers
        for name, each in contenders.items():
            runs[f"{sparsity:.0%}, {name}"] = mean(lambda text, each=each: pruned(model, each, text, read), texts)
        out = frozenset(least[: round(sparsity * layers)])
        runs[f"{sparsity:.0%}, whole layers"] = mean(lambda text, out=out: without(model, out, text, read), texts)
        print(json.dumps(runs, indent=1), flush=True)
    facts = {
        "command": f"OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}",
        "texts": len(texts),
        "read": read,
        "behind": options.behind,
        "trained": [{"command": each.facts["command"], "validation": each.facts["validation"]} for each in trained],
        "rows": runs,
    }
    write_result(RESULTS / "pruning.json", facts, summary=["trained"])


if __name__ == "__main__":
    main()
