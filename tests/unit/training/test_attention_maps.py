"""Attention while training: entropies of known rows, penalties' bands and slopes, and what they bring about."""

from __future__ import annotations

import math

import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.config import ShortConv
from decodery.models.torch.side_by_side import predicted
from decodery.models.torch.transformer import Transformer
from decodery.testing import tiny_transformer
from decodery.training.attention_maps import entropy_penalty, evenness, locality_penalty, looked_at, most, row_entropy
from decodery.training.cut import parameters
from decodery.training.short_conv import with_short_convolutions

TOKENS = torch.randint(0, 64, (3, 24), generator=torch.Generator().manual_seed(0))


def uniform(n: int) -> torch.Tensor:
    rows = torch.ones(n, n, dtype=torch.float64).tril()
    return (rows / rows.sum(dim=-1, keepdim=True))[None, None]


def own(n: int) -> torch.Tensor:
    """Every row rests on itself."""
    return torch.eye(n, dtype=torch.float64)[None, None]


def test_entropies_of_known_rows() -> None:
    assert torch.allclose(row_entropy(uniform(20))[0, 0], most(20), atol=1e-6)
    assert row_entropy(own(20)).abs().max() < 1e-6
    assert most(3).tolist() == pytest.approx([0.0, math.log(2), math.log(3)])
    both = evenness([torch.cat([uniform(20), own(20)], dim=1)])
    assert both[0].tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_what_is_looked_at_is_what_the_model_computes() -> None:
    model = tiny_transformer(0)
    logits, maps = looked_at(model, TOKENS)
    assert (logits - predicted(model, TOKENS)).abs().max() < 1e-10
    assert len(maps) == 2 and maps[0].shape == (3, 4, 24, 24)
    for each in maps:
        assert torch.allclose(each.sum(dim=-1), torch.ones_like(each[..., 0])) and (each.triu(1) == 0).all()


def test_the_penalty_is_zero_inside_its_band_and_its_slope_is_right_outside() -> None:
    maps = [torch.cat([uniform(16), own(16)], dim=1)]

    def at(*shares: float) -> torch.Tensor:
        return torch.logit(torch.tensor([shares], dtype=torch.float64))

    assert entropy_penalty(maps, at(0.85, 0.15)) == 0.0
    # One head is outside: by half of the largest entropy, in all rows that count.
    assert float(entropy_penalty(maps, at(0.5, 0.15))) == pytest.approx(float((most(16)[8:] / 2).square().mean()) / 2)
    # As published, even rows at the begin of a text are taken for narrow ones.
    assert entropy_penalty(maps, at(0.85, 0.15), published=True) > 0.1
    scores = torch.randn(2, 2, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)

    def penalty(scores: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        return entropy_penalty([weights], thresholds, tolerance=0.05) + locality_penalty([weights], 4)

    thresholds = at(0.3, 0.6).requires_grad_(True)
    assert torch.autograd.gradcheck(penalty, (scores.requires_grad_(True), thresholds))


def test_what_stays_in_its_block_costs_nothing() -> None:
    n, block = 12, 4
    inside = torch.block_diag(*[uniform(block)[0, 0]] * 3)[None, None]
    assert locality_penalty([inside], block) == 0.0
    assert locality_penalty([inside], 3) > 0.1
    # All of every row goes to the first block: its eight rows of other blocks give 1 each.
    first = torch.zeros(1, 1, n, n, dtype=torch.float64)
    first[..., 0] = 1.0
    assert float(locality_penalty([first], block)) == pytest.approx(math.sqrt(8))


def trained(kind: str) -> tuple[float, float]:
    """Evenness of heads and the share that goes to other blocks, after a few steps under one penalty alone."""
    model = tiny_transformer(3, dtype=torch.float32)
    learned = parameters(model)
    thresholds = torch.full((2, 4), -1.0, requires_grad=True)
    steps = torch.optim.Adam([each for each in learned.values() if each.ndim == 2], lr=3e-3)
    for _ in range(40 if kind else 0):
        _, maps = looked_at(model, TOKENS)
        loss = entropy_penalty(maps, thresholds, tolerance=0.05) if kind == "entropy" else locality_penalty(maps, 8)
        steps.zero_grad()
        loss.backward()
        steps.step()
    with torch.no_grad():
        _, maps = looked_at(model, TOKENS)
        of = torch.arange(24) // 8
        outside = torch.stack([each[..., of[:, None] != of].sum() / each.sum() for each in maps]).mean()
        return float((evenness(maps) - torch.tensor(-1.0).sigmoid()).abs().mean()), float(outside)


def test_a_few_steps_bring_heads_to_their_share_or_into_their_blocks() -> None:
    away, outside = trained("")
    guided, local = trained("entropy")[0], trained("local")[1]
    assert guided < away / 2 and local < outside / 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"thresholds \[1, 1\]"):
        entropy_penalty([own(9)], torch.zeros(2, 1))
    with pytest.raises(SettingsError, match="at least one token"):
        locality_penalty([own(9)], 0)
    model: Transformer = with_short_convolutions(tiny_transformer(0), ShortConv())
    with pytest.raises(UnsupportedModel, match="causal models"):
        looked_at(model, TOKENS)
