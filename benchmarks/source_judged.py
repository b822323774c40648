"""Sources that a reward steers: controlled decoding and Transfer Q*, judged by how long the words are."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources import ControlledDecoding, TransferQ
from decodery.sampling import Sampler
from decodery.scorers import TextScore, ValueHead
from decodery.search.controlled_blocks import ControlledBlocks
from decodery.step.logits_source import LogitsSource
from decodery.step.sequence import Sequence
from decodery.training.sampled_value import train_value
from source_bench import Bench, cost, logprobs


def long_words(text: str) -> float:
    """A reward between 0 and 1: how far the mean word is beyond three letters, of ten."""
    words = re.findall(r"[a-zA-Z]+", text)
    return min(1.0, max(0.0, (sum(map(len, words)) / len(words) - 3) / 7)) if words else 0.0


class Judging:
    """Long words wanted: prompts to learn from, prompts held out, and what texts are worth."""

    def __init__(self, bench: Bench, held: int) -> None:
        self.bench, self.model, self.tokenizer = bench, bench.lm.model, bench.lm.tokenizer
        self.decode = bench.lm.tokenizer.decode
        self.reward = TextScore(long_words, decode=self.decode)
        asked = [bench.lm.encode(each) for each in bench.questions(12 + held)]
        self.train, self.held = asked[:12], asked[12:]
        self.sampler = Sampler.from_settings(temperature=1.0, top_k=10)

    def drawn(self, source: LogitsSource | None, seeds: int) -> list[Sequence]:
        """Texts of the held-out prompts."""
        runs = (self.bench.run(self.held, source, sampler=self.sampler, seed=seed) for seed in range(seeds))
        return [text for run in runs for text in run]

    def worth(self, texts: list[Sequence]) -> list[float]:
        return [long_words(self.decode(text.generated)) for text in texts]

    def judged(self, texts: list[Sequence], source: LogitsSource | None = None) -> dict[str, Any]:
        """Mean reward and cost, and with a source the KL per token from the model among its ten most likely tokens."""
        rewards = self.worth(texts)
        result: dict[str, Any] = {"reward": round(sum(rewards) / len(rewards), 4)}
        if source is not None:
            kls = []
            for text in texts:
                law = logprobs(source.over(self.model, text.tokens[: text.request.prompt_length]), text)
                own = logprobs(self.model, text)
                own = own.masked_fill(own < own.topk(10).values[:, -1:], -torch.inf).log_softmax(-1)
                kls.append(torch.where(law.exp() > 0, law.exp() * (law - own), 0.0).sum(-1))
            result["kl per token"] = round(float(torch.cat(kls).mean()), 4)
        return result | cost(texts)


def controlled(bench: Bench) -> dict[str, Any]:
    """Long words wanted: reward and KL per token of controlled decoding by token and by block, and of best of n."""
    judging = Judging(bench, 6)
    found: dict[str, Any] = {"prompts to learn from": len(judging.train), "prompts held out": len(judging.held)}
    drawn = judging.drawn(None, 8)
    plain = [drawn[start :: len(judging.held)] for start in range(len(judging.held))]
    found["model, top 10"] = judging.judged([text for texts in plain for text in texts[:2]])
    for n in (2, 4, 8):
        best = [max(judging.worth(texts[:n])) for texts in plain]
        kl = (math.log(n) - (n - 1) / n) / bench.tokens
        found[f"best of {n}"] = {"reward": round(sum(best) / len(best), 4), "kl per token": round(kl, 4)}
    eos = tuple(judging.tokenizer.eos_ids)
    for method, strengths in (("q", (5.0, 20.0)), ("fudge", (5.0, 20.0, 60.0))):
        settings = {"samples": 8, "length": 24, "eos_ids": eos, "ridge": 1e-2}
        head = train_value(judging.model, judging.train, judging.reward, method=method, **settings)
        for strength in strengths:
            source = ControlledDecoding(ValueHead(head), strength)
            row = found[f"by token, {method}, {strength:g}"] = judging.judged(judging.drawn(source, 2), source)
            print(method, strength, row, flush=True)
    for samples in (2, 4, 8):
        texts = []
        for prompt in judging.held:
            request = Request(prompt, bench.tokens, judging.sampler, eos_ids=eos)
            texts += ControlledBlocks(ValueHead(head), samples=samples, block=8).run(Engine(judging.model), request)
        rows = sum(text.trace.rows for text in texts) / sum(len(text.generated) for text in texts)
        found[f"by block of 8, fudge, best of {samples}"] = judging.judged(texts) | {"rows": round(rows, 3)}
        print(samples, found[f"by block of 8, fudge, best of {samples}"], flush=True)
    return found


def transfer_q(bench: Bench) -> dict[str, Any]:
    """Long words wanted: reward of Transfer Q* with the model's own rollouts, and with those of one told to."""
    judging = Judging(bench, 4)
    found: dict[str, Any] = {"model, top 10": judging.judged(judging.drawn(None, 2))}
    told = "Explain the sophisticated characteristics of international telecommunication infrastructure."
    for weight in (10.0, 40.0):
        common = {"k": 10, "weight": weight, "length": 6, "end": tuple(judging.tokenizer.eos_ids)}
        sources = {
            "own rollouts": TransferQ(judging.reward, **common),
            "another prompt's": TransferQ(judging.reward, prompt=tuple(bench.lm.encode(told)), **common),
        }
        for name, source in sources.items():
            found[f"{name}, weight {weight:g}"] = row = judging.judged(judging.drawn(source, 1))
            print(name, weight, row, flush=True)
    return found
