"""Rows of bytes with a scale: what they keep of numbers, and that coding once more changes nothing."""

from __future__ import annotations

import pytest
import torch

from decodery.models.cache.coded import MOST, SCALE, WEIGHT_MOST, apart, decode, encode, products, weighted_sums

ROWS = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 500)[:, None]


def test_what_is_coded_once_more_is_the_same() -> None:
    coded = encode(ROWS)
    assert coded.shape == (500, 64 + SCALE) and coded.dtype == torch.int8
    assert torch.equal(encode(decode(coded)), coded)
    # A scale of all its bits, rounded to nothing, is one that rows do not come back to.
    assert (ROWS.abs().amax(1) / MOST != apart(coded)[1][:, 0]).any()


def test_every_number_is_half_a_step_away_at_most() -> None:
    numbers, scale = apart(encode(ROWS))
    assert (numbers.abs().amax(1) == MOST).all()
    assert ((decode(encode(ROWS)) - ROWS).abs() <= scale * 0.501).all()


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_a_row_with_a_number_that_is_none_is_none(strange: float) -> None:
    rows = ROWS[:3].clone()
    rows[1, 5] = strange
    found = decode(encode(rows))
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
    assert not decode(encode(torch.zeros(2, 8))).any()


def test_products_are_those_of_the_numbers() -> None:
    queries = torch.randn(7, 1, 64, generator=torch.Generator().manual_seed(1))
    keys = encode(ROWS)
    expected = (queries.double() * decode(keys).double()).sum(-1)
    size = queries.norm(dim=-1) * decode(keys).norm(dim=-1)
    assert ((products(queries, keys) - expected).abs() <= 2e-4 * size).all()


def test_weighted_sums_are_those_of_the_numbers_in_any_order() -> None:
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(3))
    coded = encode(rows)
    weights = torch.rand(3, 200, generator=torch.Generator().manual_seed(2))
    hidden = torch.zeros(3, 200, dtype=torch.bool)
    hidden[1, 150:] = True
    expected = weights.masked_fill(hidden, 0.0).double() @ decode(coded).double()
    found = weighted_sums(weights, coded, hidden)
    # A weight is half a step away at most.
    size = (weights * apart(coded)[1][:, 0]).amax(-1, keepdim=True) / WEIGHT_MOST * 0.501
    assert ((found - expected).abs() <= size * apart(coded)[0].abs().double().sum(0) + 1e-5).all()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(4))
    assert torch.equal(weighted_sums(weights[:, order], coded[order], hidden[:, order]), found)


def test_a_hidden_row_weighs_nothing_and_a_seen_one_that_is_none_makes_none() -> None:
    rows = ROWS[200:203].clone()
    rows[1, 5] = torch.nan
    hidden = torch.tensor([[False, True, False], [False, False, False]])
    found = weighted_sums(torch.ones(2, 3), encode(rows), hidden)
    assert found[0].isfinite().all() and found[1].isnan().all()
