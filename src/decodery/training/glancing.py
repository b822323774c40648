"""Glancing for heads that guess several states at once: answers of wrong guesses are shown, fewer as training goes on.

It is the coupled sequential glancing distillation (CSGD) of Falcon (2024).
"""

from __future__ import annotations

import torch

from decodery.speculative.drafters.falcon import FalconHead
from decodery.speculative.heads.head import Guess

from .head_batch import Taught

_MOST, _LEAST = 0.45, 0.1
"""The part of the wrong guesses whose answers are shown, at the beginning and at the end of a training."""


def glancing(head: FalconHead, batch: Taught, depths: int, along: float, seed: int) -> list[Guess]:
    """Guesses of a step of a training, some of whose items are the answers.

    Args:
        head: The head.
        batch: Texts side by side.
        depths: How far it is unrolled.
        along: How much of its training is done, from 0 to 1.
        seed: Of what is drawn.
    """
    with torch.no_grad():
        wrong = _wrong(head, batch)
    shown = drawn(wrong, batch.weight[:, : batch.places] > 0, _LEAST + (_MOST - _LEAST) * (1 - along), seed)
    return head.unroll_glancing(batch.states, batch.tokens[:, : batch.places + depths - 1], depths, shown)


def drawn(wrong: torch.Tensor, taught: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Which items are shown [b, n] bool: of each text as many as `share` of its wrong guesses, at random.

    Args:
        wrong: [b, n] bool, which guesses are.
        taught: [b, n] bool, where something is learned.
        share: From 0 to 1.
        seed: Of what is drawn.
    """
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    random = torch.rand(wrong.shape, generator=drawn, dtype=torch.float32, device="cpu").to(wrong.device)
    places = torch.where(taught, random, torch.inf).argsort(dim=1).argsort(dim=1)
    return (places < (share * wrong.sum(dim=1, keepdim=True)).round()) & taught


def _wrong(head: FalconHead, batch: Taught) -> torch.Tensor:
    """[b, n] bool: whether an item's own guess, the last of its block, is another token than the target's."""
    step = head.block_size - 1
    guess = batch.unrolled(head, step + 1)[step]
    likely, share, weight = batch.at(step)
    wrong = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    rows = weight > 0
    best = likely[rows].gather(1, share[rows].argmax(dim=1, keepdim=True))[:, 0]
    wrong[rows] = head.project(guess.spoken[rows], step).argmax(dim=-1) != best
    return wrong
