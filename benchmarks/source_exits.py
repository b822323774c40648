"""Leaving the embedded model early with heads of `decodery train sec`: layers, agreement, what Stop is worth."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from decodery.core.ledger import Ledger, charging
from decodery.logits_sources.sec import SEC
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.trained.exits import HEADS, STOP, ExitHeads
from decodery.step.forward_request import run_sync
from source_bench import Bench

HEADS_AT = Path(os.environ.get("DECODERY_EXIT_HEADS", "runs/sec")) / HEADS
READ, WRITTEN, TEXTS = 48, 10, 10
"""Tokens of a text that are read, that are completed, and how many texts."""
EXITS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
STOPS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def pieces(bench: Bench) -> Iterator[list[int]]:
    """Pieces of a program that the heads did not learn from, evenly spread."""
    file = Path(sysconfig.get_paths()["stdlib"]) / "queue.py"
    ids = bench.lm.tokenizer.encode(file.read_text("utf-8"), special=False)
    size = READ + 4 * WRITTEN
    for number in range(TEXTS):
        first = number * (len(ids) - size) // (TEXTS - 1)
        yield ids[first : first + size]


@torch.no_grad()
def sec(bench: Bench) -> dict[str, Any]:
    """Completions of 10 tokens of a program. By t_exit, along the whole model's greedy completion: layers per token,
    and how often the same token is said there. By t_stop: how many places of the program's own text would end a
    completion, and at how many of those the whole model is wrong; nobody leaves."""
    heads = ExitHeads.load(HEADS_AT)
    layers, model = bench.lm.model.config.num_layers, bench.lm.model
    same, passed = dict.fromkeys(EXITS, 0), dict.fromkeys(EXITS, 0.0)
    said, wrong = [], []
    for piece in pieces(bench):
        prompt, cache = piece[:READ], model.new_cache()
        first = int(_read(bench, prompt, cache)[0])
        clone, written = cache.fork(), [first]
        while len(written) < WRITTEN:
            written.append(int(_read(bench, written[-1:], clone)[0]))
        for bar in EXITS:
            ledger, reader = Ledger(), SEC(heads, bar, 1.0).over(model, prompt)
            with charging(ledger):
                segment = Segment.chunk(written[:-1], cache.fork())
                found = run_sync(reader.compose(segment)).logits.argmax(dim=-1)  # type: ignore[attr-defined]
            same[bar] += int((found == torch.tensor(written[1:])).sum())
            passed[bar] += ledger.counts["layers"]
        taps = tuple(range(heads.every, layers, heads.every))
        scores = model.forward(Batch([Segment.chunk(piece[READ:], cache)]), taps=taps)
        laws = torch.stack([heads.classes(scores.hidden[tap]) for tap in taps])
        stops = torch.where(laws.argmax(dim=-1) == STOP, laws[..., STOP], 0.0).max(dim=0).values
        said.append(stops[:-1])
        wrong.append(scores.logits[:-1].argmax(dim=-1) != torch.tensor(piece[READ + 1 :]))
    rows, sure, missed = TEXTS * (WRITTEN - 1), torch.cat(said), torch.cat(wrong)
    figures: dict[str, Any] = {
        f"t_exit {bar:g}": {"layers per token": round(passed[bar] / rows, 2), "agreement": round(same[bar] / rows, 3)}
        for bar in EXITS
    }
    for bar in STOPS:
        stopped = sure > bar
        precision = {"wrong where it stops": round(float(missed[stopped].double().mean()), 3)} if stopped.any() else {}
        figures[f"t_stop {bar:g}"] = {"stops": round(float(stopped.double().mean()), 3), **precision}
    return figures | {
        "heads": " ".join(Path(word).name if word.endswith(".py") else word for word in heads.facts["command"].split()),
        "right by layer, where it was trained": heads.facts["validation"]["right with the corrected head"],
        "wrong anywhere": round(float(missed.double().mean()), 3),
        "places": len(missed),
        "layers": layers,
    }


def _read(bench: Bench, tokens: list[int], cache: KVCache) -> torch.Tensor:
    """The most likely token after these; the cache keeps them."""
    segment = Segment.chunk(tokens, cache, logit_rows=[len(tokens) - 1])
    found = bench.lm.model.forward(Batch([segment])).logits.argmax(dim=-1)
    cache.keep(range(len(tokens)))
    return found
