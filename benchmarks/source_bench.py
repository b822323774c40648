"""What the benchmarks of logit sources share: a loaded model with prompts, and what texts cost and are worth."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import decodery as dc
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.protocol import LanguageModel
from decodery.step.logits_source import LogitsSource
from decodery.step.sequence import Sequence

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))


@dataclass
class Bench:
    """The loaded model, a smaller one, and prompts of one turn each."""

    lm: dc.LLM
    small: str
    tokens: int

    def questions(self, count: int) -> list[str]:
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        turns = [json.loads(line)["turns"][0] for line in lines]
        return [turn for turn in turns if len(turn) < 300][:: max(1, len(turns) // (3 * count))][:count]

    def run(self, prompts: Iterable[list[int]], source: LogitsSource | None, **settings: Any) -> list[Sequence]:
        """All prompts in one batch, greedy unless a sampler is given."""
        settings = {"max_new_tokens": self.tokens, "eos_ids": tuple(self.lm.tokenizer.eos_ids), **settings}
        engine = Engine(self.lm.model, detokenizer=self.lm.tokenizer.stream)
        texts = [engine.submit(Request(prompt, logits_source=source, **settings)) for prompt in prompts]
        engine.run(texts)
        return texts


def cost(texts: Iterable[Sequence]) -> dict[str, float]:
    """Everything counted, per output token, prompts included."""
    total: Counter[str] = Counter()
    tokens = 0
    for text in texts:
        ledger = text.trace.ledger
        total.update(ledger.counts)
        total.update({f"{name} passes": amount for name, amount in ledger.passes.items()})
        total.update({f"{name} rows": amount for name, amount in ledger.rows.items()})
        tokens += len(text.generated)
    return {name: round(count / tokens, 3) for name, count in sorted(total.items())} | {"tokens": tokens}


@torch.no_grad()
def logprobs(model: LanguageModel, text: Sequence) -> torch.Tensor:
    """[generated, vocab] log-laws of `model` at the output positions."""
    rows = range(text.request.prompt_length - 1, len(text.tokens) - 1)
    segment = Segment.chunk(text.tokens[:-1], model.new_cache(), logit_rows=list(rows))
    return model.forward(Batch([segment])).logits.double().log_softmax(dim=-1)


def nll(model: LanguageModel, texts: Iterable[Sequence]) -> float:
    """Mean negative log-likelihood per token in nats."""
    values = [logprobs(model, text)[range(len(text.generated)), text.generated] for text in texts]
    return round(float(-torch.cat(values).mean()), 4)


def distinct(texts: Iterable[Sequence]) -> float:
    """Share of distinct bigrams among all bigrams of each text, averaged."""
    shares = []
    for text in texts:
        pairs = list(zip(text.generated, text.generated[1:], strict=False))
        shares.append(len(set(pairs)) / max(1, len(pairs)))
    return round(sum(shares) / len(shares), 3)
