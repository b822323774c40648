"""Rows of bytes with a scale: what they keep of numbers, and that coding once more changes nothing."""

from __future__ import annotations

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.cache.coded import (
    FLOATS,
    MOST,
    SCALE,
    WEIGHT_MOST,
    apart,
    decode,
    encode,
    products,
    weighted_sums,
)
from decodery.models.cuda.graphs import StaticPasses
from decodery.testing import Garbage, check_identical, check_state, tiny_transformer

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


def test_numbers_of_eight_bits_are_near() -> None:
    coded = encode(ROWS, FLOATS)
    numbers, scale = apart(coded)
    assert coded.shape == (500, 64 + SCALE) and numbers.dtype == FLOATS
    assert (torch.frexp(scale)[0] == 0.5).all()
    error = (decode(coded) - ROWS).abs()
    # Three bits after the first one, and steps of 2^-9 of the scale below the least number that has them.
    assert (error <= torch.maximum(ROWS.abs() / 16, scale * 2.0**-10)).all() and (error > ROWS.abs() / 40).any()
    assert torch.equal(decode(encode(decode(coded), FLOATS)), decode(coded))
    assert (apart(encode(ROWS, FLOATS))[0].view(torch.float8_e4m3fn).float().abs().amax(1) > 223).all()


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_a_row_of_floats_with_a_number_that_is_none_is_none(strange: float) -> None:
    rows = ROWS[:3].clone()
    rows[1, 5] = strange
    found = decode(encode(rows, FLOATS))
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
    assert not decode(encode(torch.zeros(2, 8), FLOATS)).any()


PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]


@pytest.mark.usefixtures("pools_of_pytorch")
@pytest.mark.parametrize(("held", "off"), [(torch.int8, 0.03), (torch.float8_e4m3fn, 0.15)])
@pytest.mark.parametrize("static", [False, True])
def test_devices_keep_keys_and_values_in_bytes(held: torch.dtype, off: float, static: bool) -> None:
    whole, model = tiny_transformer(), tiny_transformer()
    model.pages_together, model.static = True, StaticPasses() if static else None
    model.narrow_caches(held)
    logits = []
    for each in (whole, model):
        cache = each.new_cache()
        with torch.no_grad():
            each.forward(Batch([Segment.chunk(range(40), cache)]))
            cache.keep(range(40))
            logits.append(each.forward(Batch([Segment.chunk([3, 4], cache)])).logits)
    assert 0 < (logits[1] - logits[0]).norm() < off * logits[0].norm()
    assert model.new_cache().slot_bytes < 0.2 * whole.new_cache().slot_bytes
    check_identical(model, PROMPTS, drafter=Garbage(nodes=9), max_new_tokens=16)
    check_state(model, PROMPTS[:1], drafter=Garbage(nodes=9), max_new_tokens=12)


def test_what_devices_keep_in_bytes_is_refused_elsewhere() -> None:
    model = tiny_transformer()
    with pytest.raises(SettingsError, match="on devices alone: choose int8"):
        model.narrow_caches(torch.float8_e4m3fn)
    model.pages_together = True
    with pytest.raises(SettingsError, match="are not kept in float16: choose int8 or float8"):
        model.narrow_caches(torch.float16)
