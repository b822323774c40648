"""Warps written down plainly, for one row as a list, and rows of logits to compare them on."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as hf

from decodery.sampling import (
    Context,
    Epsilon,
    Eta,
    FrequencyPenalty,
    LogitBias,
    LogitsProcessor,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    TopK,
    TopP,
    Typical,
)

V = 50


INF = math.inf


def distinct_rows(count: int, size: int = V, seed: int = 0) -> torch.Tensor:
    """Rows without ties, from flat to peaked."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]).repeat(count)[:count, None]
    return torch.randn(count, size, generator=generator) * scales


def tied_rows() -> torch.Tensor:
    """Rows of whole and half numbers, one-hot rows, equal rows, and rows in which much is excluded already."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(-6, 4, (60, V), generator=generator).float()
    halves = torch.randint(-4, 5, (60, V), generator=generator) / 2
    one_hot = torch.full((12, V), -INF).scatter_(1, torch.arange(12)[:, None], 3.0)
    nearly = torch.zeros(12, V).scatter_(1, torch.arange(12)[:, None], 30.0)
    equal = torch.zeros(1, V)
    holes = whole[:20].masked_fill(torch.rand(20, V, generator=generator) < 0.8, -INF)
    holes[:, 7] = 1.0
    return torch.cat([whole, halves, one_hot, nearly, equal, holes])


ROWS = torch.cat([distinct_rows(200), tied_rows()])


def contexts_for(count: int, seed: int = 0, size: int = V) -> list[Context]:
    """Histories of a few to many tokens, with many repetitions, no two alike."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        tokens = [draw.randrange(min(size, 3) if index % 2 else size) for _ in range(draw.randrange(1, 40))]
        made.append(Context(draw.randrange(len(tokens) + 1), tokens))
    return made


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set((row > -INF).nonzero().flatten().tolist()) for row in logits]


def softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


def entropy(probs: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probs if p > 0)


def keep_top_k(row: list[float], k: int) -> set[int]:
    border = sorted(row, reverse=True)[min(k, len(row)) - 1]
    return {i for i, value in enumerate(row) if value >= border and value > -INF}


def keep_top_p(row: list[float], p: float) -> set[int]:
    probs, chosen, mass = softmax(row), set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        if mass >= p:
            break
        chosen.add(i)
        mass += probs[i]
    return chosen


def keep_min_p(row: list[float], p: float) -> set[int]:
    probs = softmax(row)
    return {i for i, prob in enumerate(probs) if prob > 0 and prob >= p * max(probs)}


def keep_typical(row: list[float], mass: float) -> set[int]:
    probs = softmax(row)
    mean = entropy(probs)
    far = {i: abs(-math.log(prob) - mean) for i, prob in enumerate(probs) if prob > 0}
    held, border = 0.0, 0.0
    for i in sorted(far, key=lambda i: far[i]):
        if held >= mass:
            break
        held, border = held + probs[i], far[i]
    return {i for i in far if far[i] <= border + 1e-6}


def keep_above(row: list[float], cutoff: float) -> set[int]:
    probs = softmax(row)
    return {i for i, prob in enumerate(probs) if prob > 0 and (prob >= cutoff or row[i] == max(row))}


def keep_epsilon(row: list[float], cutoff: float) -> set[int]:
    return keep_above(row, cutoff)


def keep_eta(row: list[float], cutoff: float) -> set[int]:
    return keep_above(row, min(cutoff, math.sqrt(cutoff) * math.exp(-entropy(softmax(row)))))


TRUNCATIONS: list[tuple[LogitsProcessor, Callable[[list[float], Any], set[int]], Any, hf.LogitsProcessor]] = [
    *((TopK(k), keep_top_k, k, hf.TopKLogitsWarper(k)) for k in (1, 2, 7, 49)),
    *((TopP(p), keep_top_p, p, hf.TopPLogitsWarper(p)) for p in (1e-6, 0.3127, 0.9031, 0.98765)),
    *((MinP(p), keep_min_p, p, hf.MinPLogitsWarper(p)) for p in (0.0501, 0.31, 1.0)),
    *((Typical(m), keep_typical, m, hf.TypicalLogitsWarper(m)) for m in (0.2117, 0.9031, 0.98765)),
    *((Epsilon(c), keep_epsilon, c, hf.EpsilonLogitsWarper(c)) for c in (3.1e-4, 0.0231, 0.71)),
    *((Eta(c), keep_eta, c, hf.EtaLogitsWarper(c)) for c in (3.1e-4, 0.0231, 0.71)),
]


def seen(processor: LogitsProcessor, contexts: Sequence[Context]) -> list[Context]:
    """The contexts with the state that the processor has there."""
    made = []
    for each in contexts:
        state = processor.init(each.tokens[: each.prompt_length])
        for token in each.tokens[each.prompt_length :]:
            state = processor.advance(state, token, -1.0)
        made.append(Context(each.prompt_length, each.tokens, state, each.seed))
    return made


def reference_edit(processor: LogitsProcessor, row: list[float], context: Context) -> list[float]:
    output = Counter(context.tokens[context.prompt_length :])
    row = list(row)
    for token in range(len(row)):
        if isinstance(processor, RepetitionPenalty) and token in context.tokens:
            row[token] = row[token] / processor.penalty if row[token] > 0 else row[token] * processor.penalty
        if isinstance(processor, PresencePenalty) and output[token]:
            row[token] -= processor.penalty
        if isinstance(processor, FrequencyPenalty):
            row[token] -= processor.penalty * output[token]
        if isinstance(processor, LogitBias):
            row[token] += dict(processor.bias).get(token, 0.0)
    return row
