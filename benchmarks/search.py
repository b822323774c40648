"""What searches find and what they cost, on the embedded model.

    python benchmarks/search.py [GROUP ...] [--prompts 12] [--out benchmarks/results]

Prompts come from Spec-Bench and GSM8K (DECODERY_DATA). Nothing is timed, so that the machine's load does not matter.
Every group writes search-GROUP.json.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.llm.llm import LLM, Output
from decodery.models.batch import Batch, Segment
from decodery.search import Beam, ContrastiveSearch, Coupling, DiverseBeam, ExactExtract
from decodery.search.base import Search
from decodery.search.mec import bottleneck, entropy
from groups import parser, record

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))


class Bench:
    """The model and the prompts."""

    def __init__(self, prompts: int) -> None:
        self.lm: LLM = dc.load("smollm2")
        questions = [json.loads(line) for line in (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()]
        short = [question["turns"][0] for question in questions if len(question["turns"][0]) < 400]
        self.prompts: list[str] = short[:: max(1, len(short) // prompts)][:prompts]
        problems = (DATA / "gsm8k_train_1000.jsonl").read_text("utf-8").splitlines()[:prompts]
        self.passages: list[str] = [json.loads(line)["question"] for line in problems]

    def search(self, search: Search, prompts: Sequence[str], **settings: Any) -> list[list[Output]]:
        return [self.lm.search(prompt, search, **settings) for prompt in prompts]


def distinct(texts: Sequence[Sequence[int]]) -> float:
    """Distinct pairs of tokens among all pairs of these texts."""
    pairs = [pair for text in texts for pair in pairwise(text)]
    return len(set(pairs)) / max(1, len(pairs))


def repeated(text: Sequence[int], n: int) -> float:
    """Share of n-grams that stand earlier in the text already."""
    grams = [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]
    return 1 - len(set(grams)) / max(1, len(grams))


def cost(outputs: Sequence[Output]) -> dict[str, float]:
    tokens = sum(len(output.tokens) for output in outputs)
    return {
        "passes_per_token": round(sum(output.trace.passes for output in outputs) / tokens, 3),
        "rows_per_token": round(sum(output.trace.rows for output in outputs) / tokens, 3),
    }


def logprob(output: Output) -> float:
    """The model's own log-probability of a text, in nats."""
    assert output.logprobs is not None
    return sum(entry.logprob for entry in output.logprobs)


def beam(bench: Bench) -> dict[str, Any]:
    """Summed log-probability (nats) of the best of `width` beams against greedy decoding; length_penalty 0."""
    settings = {"max_new_tokens": 40, "logprobs": 0}
    greedy = [bench.lm.generate(prompt, drafter=None, **settings) for prompt in bench.prompts]
    found: dict[str, Any] = {"greedy": {"logprob": round(float(np.mean([logprob(out) for out in greedy])), 3)}}
    for width in (2, 4, 8):
        best = [outputs[0] for outputs in bench.search(Beam(width, length_penalty=0.0), bench.prompts, **settings)]
        gains = [logprob(ours) - logprob(theirs) for ours, theirs in zip(best, greedy, strict=True)]
        found[f"width {width}"] = {
            "logprob": round(float(np.mean([logprob(out) for out in best])), 3),
            "better": sum(gain > 1e-4 for gain in gains),
            "equal": sum(abs(gain) <= 1e-4 for gain in gains),
            "worse": sum(gain < -1e-4 for gain in gains),
            **cost(best),
        }
    return found


def diverse(bench: Bench) -> dict[str, Any]:
    """Six texts per prompt: distinct pairs of tokens, the best and the mean log-probability per token."""
    searches: dict[str, Search] = {"beam:width=6": Beam(6)}
    for groups, diversity in ((6, 0.2), (6, 0.5), (6, 0.8), (3, 0.5)):
        name = f"diverse-beam:width=6,groups={groups},diversity={diversity}"
        searches[name] = DiverseBeam(6, groups, diversity)
    found = {}
    for name, search in searches.items():
        lists = bench.search(search, bench.prompts, max_new_tokens=32)
        scores = [[output.score or 0.0 for output in outputs] for outputs in lists]
        found[name] = {
            "distinct_2": round(float(np.mean([distinct([out.tokens for out in outputs]) for outputs in lists])), 4),
            "best": round(float(np.mean([max(each) for each in scores])), 4),
            "mean": round(float(np.mean([np.mean(each) for each in scores])), 4),
            **cost([outputs[0] for outputs in lists]),
        }
    return found


QUESTION = "Text: {}\n\nWho or what is this text about? Answer with words of the text only."


def extract(bench: Bench) -> dict[str, Any]:
    """The most likely span of GSM8K problems as an answer: against every span scored, and against greedy decoding."""
    lm, figures = bench.lm, dict[str, float]()

    def count(name: str, amount: float) -> None:
        figures[name] = figures.get(name, 0) + amount

    for passage in bench.passages:
        search = ExactExtract(passage).bind(lm.tokenizer)
        prompt = QUESTION.format(passage)
        (answer,) = lm.search(prompt, search)
        greedy = lm.generate(prompt, drafter=None, max_new_tokens=64, logprobs=0)
        score, span, spans, rows, passes = brute_force(lm, prompt, search)
        assert answer.score is not None
        count("passages", 1)
        count("spans", spans)
        count("agree_with_every_span_scored", answer.tokens[:-1] == span)
        count("agree_in_score_to_1e-6", abs(answer.score - score) < 1e-6)
        count("passes", answer.trace.passes)
        count("rows", answer.trace.rows)
        count("passes_to_score_every_span", passes)
        count("rows_to_score_every_span", rows)
        count("greedy_is_the_optimum", greedy.tokens[:-1] == span)
        count("greedy_is_no_span_and_likelier", logprob(greedy) > answer.score + 1e-4)
    return figures


@torch.no_grad()
def brute_force(lm: LLM, prompt: str, search: ExactExtract) -> tuple[float, list[int], int, int, int]:
    """The best span and its score, found start by start; how many spans there are, rows and passes that took."""
    tokens, cache = lm.encode(prompt), lm.model.new_cache()
    first = lm.model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[len(tokens) - 1])])).logits[0]
    cache.keep(range(len(tokens)))
    opening, end = first.double().log_softmax(-1), list(lm.tokenizer.eos_ids)
    assert isinstance(search.passage, tuple)
    texts = [list(search.passage[start:]) for start in range(len(search.passage))]
    texts += [list(text) for text in search.beginnings]
    best: tuple[float, list[int]] = (-math.inf, [])
    for text in texts:
        scores = lm.model.forward(Batch([Segment.chunk(text, cache)])).logits.double().log_softmax(-1)
        cache.keep([])
        total = float(opening[text[0]])
        for at, token in enumerate(text):
            if at:
                total += float(scores[at - 1, token])
            answer = total + float(scores[at, end].logsumexp(0))
            if answer > best[0]:
                best = (answer, text[: at + 1])
    rows = sum(map(len, texts))
    return *best, rows, rows, len(texts)


def coupling(bench: Bench) -> dict[str, Any]:
    """Messages of four bytes read back from the text; bits per token against the text's quality, in nats per token."""
    lm, random = bench.lm, np.random.default_rng(0)
    plain = {"messages": 200, **_couple(bench, "coupling:key=a", 200, random)}
    found: dict[str, Any] = {"default": plain, "settings": {}}
    for settings in (
        "merge=no",
        "top_k=5",
        "top_k=500",
        "temperature=0.7",
        "temperature=1.3",
        "rate=0.5,compress=step",
    ):
        found["settings"][settings] = _couple(bench, f"coupling:key=a,{settings}", 15, random)
    found["bottleneck"] = {str(rate): _bottleneck(rate) for rate in (1, 2, 4, 6, 7)}
    assert lm.dtype == "int8"
    return found


def _couple(bench: Bench, spec: str, messages: int, random: np.random.Generator) -> dict[str, float]:
    lm = bench.lm
    read = tokens = 0
    nats = bits = 0.0
    for number in range(messages):
        prompt, message = bench.prompts[number % len(bench.prompts)], random.bytes(4)
        out = lm.stego_encode(prompt, message, search=spec, max_new_tokens=1000, seed=number, logprobs=0)
        read += lm.stego_decode(prompt, out.text, 4, search=spec).message == message
        tokens += len(out.tokens)
        nats -= logprob(out)
        if number < 15:
            bits += _open_bits(lm, prompt, out, spec)
            measured = tokens
    sent = 32 * messages / tokens
    return {
        "read_exactly": read,
        "bits_per_token": round(sent, 3),
        "open_bits_per_token": round(bits / measured, 3),
        "efficiency": round(sent / (bits / measured), 3),
        "nats_per_token": round(nats / tokens, 3),
    }


@torch.no_grad()
def _open_bits(lm: LLM, prompt: str, out: Output, spec: str) -> float:
    """Summed entropy of the distributions a text's tokens were chosen from, before what a reader could not find."""
    from decodery.core.registry import resolve

    method: Coupling = resolve("search", spec)
    tokens = lm.encode(prompt)
    segment = Segment.chunk([*tokens, *out.tokens[:-1]], lm.model.new_cache())
    logits = lm.model.forward(Batch([segment])).logits[len(tokens) - 1 :].double() / method.temperature
    top = logits.topk(method.top_k).values.softmax(-1).numpy()
    return sum(entropy(row) for row in top)


def _bottleneck(rate: float) -> dict[str, float]:
    """A byte told with `rate` bits: share of bytes guessed right, and bits kept, against equal bins."""
    uniform = np.full(256, 1 / 256)
    labels = bottleneck(uniform, rate)
    bins = np.arange(256) * math.floor(2**rate) // 256
    return {
        "right": round((labels.max() + 1) / 256, 4),
        "bits": round(entropy(np.bincount(labels, weights=uniform)), 4),
        "right_equal_bins": round((bins.max() + 1) / 256, 4),
        "bits_equal_bins": round(entropy(np.bincount(bins, weights=uniform)), 4),
    }


def contrastive(bench: Bench) -> dict[str, Any]:
    """Repetition, distinct pairs and log-probability per token of 96 tokens that go on from a prompt's plain text."""
    settings = {"max_new_tokens": 96, "apply_chat_template": False, "ignore_eos": True, "logprobs": 0}
    found = {}
    for name, search in {
        "greedy": Beam(1),
        "k=4,alpha=0.3": ContrastiveSearch(4, 0.3),
        "k=4,alpha=0.6": ContrastiveSearch(4, 0.6),
        "k=8,alpha=0.6": ContrastiveSearch(8, 0.6),
    }.items():
        outputs = [outputs[0] for outputs in bench.search(search, bench.prompts, **settings)]
        found[name] = {
            **{
                f"repeated_{n}": round(float(np.mean([repeated(out.tokens, n) for out in outputs])), 4)
                for n in (2, 3, 4)
            },
            "distinct_2": round(float(np.mean([distinct([out.tokens]) for out in outputs])), 4),
            "nats_per_token": round(float(np.mean([-logprob(out) / len(out.tokens) for out in outputs])), 4),
            **cost(outputs),
        }
    return found


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "beam": beam,
    "diverse": diverse,
    "extract": extract,
    "coupling": coupling,
    "contrastive": contrastive,
}


def main() -> None:
    arguments = parser(__doc__, GROUPS)
    arguments.add_argument("--prompts", type=int, default=12)
    options = arguments.parse_args()
    bench = Bench(options.prompts)
    settings = {"model": bench.lm.name, "dtype": bench.lm.dtype, "prompts": len(bench.prompts)}
    record("search", GROUPS, options, bench, settings)


if __name__ == "__main__":
    main()
