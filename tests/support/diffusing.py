"""Denoisers of the tests, and canvases filled with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from decodery.core.registry import resolve
from decodery.diffusion.base import DiffusionDecoder
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import filled
from decodery.models.batch import Batch, Segment
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import run_sync
from decodery.testing import tiny_transformer

MASK = 19
PROMPT = [1, 2, 3, 4, 5]


def denoiser(seed: int = 1, **config: Any) -> Transformer:
    """A random bidirectional transformer in float64 whose last token of 20 is the mask."""
    base = tiny_transformer(seed, vocab_size=MASK + 1)
    return Transformer(replace(base.config, **{"causal": False, "mask_id": MASK} | config), base.weights)


KINDS: dict[str, dict[str, Any]] = {"full": {}, "shifted": {"shifted": True}, "blocks": {"block_length": 4}}
"""The three kinds of model there are."""


@torch.no_grad()
def fill(
    model: LanguageModel,
    method: str | DiffusionDecoder,
    length: int = 16,
    *,
    prompt: Sequence[int] = tuple(PROMPT),
    seed: int = 0,
    temperature: float = 0.0,
    eos: Sequence[int] = (),
) -> Canvas:
    canvas = Canvas.of(model, prompt, length, eos_ids=eos, seed=seed)
    return run_sync(filled(model, canvas, named(method), temperature))


@cache
def named(method: str | DiffusionDecoder) -> DiffusionDecoder:
    found: DiffusionDecoder = resolve("diffusion", method)
    return found


def order(canvas: Canvas) -> list[tuple[int, int]]:
    """Places and tokens as they were written."""
    return [(int(p), int(t)) for each in canvas.rounds for p, t in zip(each.positions, each.tokens, strict=True)]


def nats(canvas: Canvas) -> torch.Tensor:
    """Log-probabilities of all that was written, in that order."""
    return torch.cat([torch.from_numpy(each.logprobs) for each in canvas.rounds])


def logits_of(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    """[L, vocab] of every place, -inf for the mask."""
    with torch.no_grad():
        found = model.forward(Batch([Segment(np.arange(len(tokens)), tokens)])).logits.double().numpy()
    if model.config.shifted:
        found = np.concatenate((found[:1], found[:-1]))
    found[:, MASK] = -np.inf
    return found
