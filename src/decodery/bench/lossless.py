"""Whether a method wrote what plain decoding wrote, and whether a difference is a rounded near-tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.noise import gumbel
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment

EPSILON = {
    "float64": 1e-9,
    "float32": 1e-3,
    "int8": 1e-3,
    "int4": 1e-3,
    "float16": 0.03,
    "bfloat16": 0.25,
}
"""Logits closer than this may be ordered either way by two correct kernels of that precision."""

_CHUNK = 512


@dataclass(frozen=True)
class Difference:
    """Where two outputs part. position: of the first token that differs; gap: see `gap`; excused: a near-tie."""

    position: int
    gap: float | None
    excused: bool


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one output ends; None for equal outputs."""
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))


def compare(
    lm: LLM, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], *, temperature: float, seed: int
) -> Difference | None:
    """None where `other` is what plain decoding wrote; else where they part and how close the two tokens were.

    Outputs of which one goes on where the other ends are never excused.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    if position >= min(len(plain), len(other)):
        return Difference(position, None, False)
    pair = plain[position], other[position]
    distance = gap(lm, [*prompt, *plain[:position]], len(prompt), pair, temperature=temperature, seed=seed)
    return Difference(position, distance, distance < EPSILON.get(lm.dtype, 0.0))


@torch.no_grad()
def gap(
    lm: LLM, tokens: Sequence[int], prompt_length: int, pair: tuple[int, int], *, temperature: float, seed: int
) -> float:
    """Distance of two candidates for the token after `tokens`, from a fresh pass over all of them.

    Greedy: between their logits. Sampled: between their log-probabilities plus the noise that decides between them.
    """
    sampler = lm.request(tokens[:prompt_length], temperature=temperature, drafter=None).sampler
    cache = lm.model.new_cache()
    logits = torch.empty(0, dtype=torch.float32, device="cpu")
    for start in range(0, len(tokens), _CHUNK):
        chunk = list(tokens[start : start + _CHUNK])
        logits = lm.model.forward(Batch([Segment.chunk(chunk, cache, logit_rows=[len(chunk) - 1])])).logits
        cache.keep(range(len(chunk)))
    prompt = tokens[:prompt_length]
    begin = sampler.context(prompt, prompt_length, sampler.init(prompt), seed)
    context = sampler.ahead(begin, tokens[prompt_length:])
    scores = sampler.law(logits, [context])[0].double().cpu()
    if not sampler.greedy:
        scores = scores + gumbel(seed, context.position, torch.arange(len(scores), device="cpu"))
    first, second = (float(scores[token]) for token in pair)
    return abs(first - second)
