"""Rows of many texts on a device are truncated and drawn as each text's own sampler does it, a few rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decodery.core import noise
from decodery.sampling import Sampler, TopP, batched
from decodery.sampling.batched import BatchedSampling, Choice, batched_processors
from decodery.sampling.logits_processor import Context
from decodery.sampling.top_p import keep_prefix

VOCAB, ROWS = 260, 150
SAMPLERS = [
    Sampler.from_settings(temperature=1.0, top_p=0.9),
    Sampler.from_settings(temperature=1.6, top_p=0.35),
    Sampler.from_settings(temperature=0.7, top_k=5, top_p=0.8),
    Sampler.from_settings(temperature=1.2, top_k=40, top_p=0.95, order="llamacpp"),
    Sampler.from_settings(temperature=1.1, top_k=11, top_p=0.99, min_p=0.01),
]


def rows_of(random: np.random.Generator) -> torch.Tensor:
    """[ROWS, VOCAB] float32: sharp and flat ones, with and without equals, flat ones among them."""
    logits = random.normal(0, random.choice([0.1, 1.0, 4.0], (ROWS, 1)), (ROWS, VOCAB))
    steps = random.choice([1e-9, 0.25, 1.0, 3.0], (ROWS, 1))
    logits = np.round(logits / steps) * steps
    logits[::11] = 0.5
    return torch.from_numpy(logits).float()


class Largest(TorchDispatchMode):
    """Notes the most numbers that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        made = [] if func.is_view else [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        self.numbers = max([self.numbers, *(each.numel() for each in made)])
        return found


def disagreements(rounds: int) -> int:
    """How many rows choose other tokens than with their own text's sampler."""
    random, like, count = np.random.default_rng(0), Choice(False, (), ()), 0
    for number in range(rounds):
        sampler, logits = SAMPLERS[number % len(SAMPLERS)], rows_of(random)
        own = batched_processors(sampler, VOCAB)
        assert own is not None
        seeds, positions = np.full(ROWS, number, dtype=np.uint64), random.integers(0, 1000, ROWS)
        roots, keys = np.empty((2, 0), dtype=np.int64), noise.keys(seeds, positions)
        with Largest() as largest, pytest.MonkeyPatch.context() as patch:
            patch.setattr(batched, "_NUMBERS", 100 * VOCAB)
            picks = BatchedSampling([own]).choose(logits, np.zeros(ROWS, dtype=np.int64), keys, roots, like)
        assert 64 * VOCAB < largest.numbers <= 100 * VOCAB
        law = sampler.law(logits, [Context(0, [])] * ROWS)
        count += int((picks != sampler.pick(law, number, positions.tolist())).sum())
    return count


def test_rows_choose_as_with_their_own_sampler() -> None:
    assert disagreements(10) == 0


def highest_ids(logits: torch.Tensor, p: Any, most: int | None = None) -> torch.Tensor:
    return keep_prefix(logits.flip(-1), p, most).flip(-1)


def without_the_last(logits: torch.Tensor, p: Any, most: int | None = None) -> torch.Tensor:
    """The token that crosses p is left out, the first one aside."""
    kept = keep_prefix(logits, p, most)
    least = kept.where(kept > -torch.inf, torch.inf).amin(dim=-1, keepdim=True)
    return kept.masked_fill((kept == least) & (kept < kept.amax(dim=-1, keepdim=True)), -torch.inf)


def without_equals(logits: torch.Tensor, p: Any, most: int | None = None) -> torch.Tensor:
    """What is not sorted is not kept."""
    found = keep_prefix(logits, p, most)
    if most is None:
        return found
    best = logits.topk(min(most, logits.shape[1])).indices
    return torch.full_like(logits, -torch.inf).scatter(-1, best, found.gather(-1, best))


def test_wrong_prefixes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (highest_ids, without_the_last, without_equals):
        monkeypatch.setattr(batched, "keep_prefix", wrong)
        assert disagreements(5) > 0


def test_what_top_k_leaves_is_sorted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equals at the border of top-k, of which there may be more, are kept as by the processor's own rule."""
    random = np.random.default_rng(1)
    for share in (0.05, 0.5, 0.9, 0.999, 1 - 1e-12):
        logits = rows_of(random)
        best = logits.topk(9).values[:, -1:]
        left = logits.masked_fill(logits < best, -torch.inf)
        expected = TopP(share).process(left, [Context(0, [])] * ROWS)
        monkeypatch.setattr(torch.Tensor, "sort", None)
        assert torch.equal(keep_prefix(left, share, 16), expected)
        monkeypatch.undo()
        assert torch.equal(keep_prefix(left, share), expected)
        assert ((left > -torch.inf).sum(dim=-1) > 16).any()
