"""4-bit linear layers: exact for Q4_1 weights, the same bits from every kernel, independent of other rows."""

from __future__ import annotations

import pytest
import torch

from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.native.int4 import Int4Linear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_weights_of_a_q4_1_file_are_kept_exactly():
    """Every block of such a file holds its least and its largest value: that is how it was made."""
    values = torch.randint(0, 16, (24, 6, 32), generator=torch.Generator().manual_seed(0))
    values[..., 3], values[..., 20] = 0, 15
    step, least = random(24, 6, 1).abs().half().float(), random(24, 6, 1, seed=1).half().float()
    weight = (values * step + least).view(24, 192)
    assert torch.equal(Int4Linear.quantize(weight).dense(), weight)


def test_steps_are_finer_than_those_of_the_whole_range():
    """Weights have long tails; cutting from the least to the largest would make every step as coarse as they ask."""
    weight = random(64, 512).pow(3)
    blocks = weight.view(64, -1, 32)
    least, most = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    even = (((blocks - least) * 15 / (most - least)).round() * (most - least) / 15 + least).view(64, 512)
    x = random(100, 512, seed=1)
    error, usual = ((x @ (other - weight).T).norm() for other in (Int4Linear.quantize(weight).dense(), even))
    assert error < 0.93 * usual


def test_weights_without_a_range_are_kept():
    weight = torch.zeros(2, 64)
    weight[1, 32:] = -0.75
    assert torch.equal(Int4Linear.quantize(weight).dense(), weight)


@pytest.mark.parametrize("kernels", kernel_sets())
@pytest.mark.parametrize("shape", [(33, 96), (128, 576), (70, 32)])
def test_every_kernel_gives_the_same_bits_for_any_number_of_rows(shape, kernels):
    linear, x = Int4Linear.quantize(random(*shape), random(shape[0], seed=1)), random(21, shape[1], seed=2)
    expected = linear.portable(x)
    choose(kernels)
    try:
        for n in (1, 2, 3, 5, 8, 9, 16, 21):
            assert torch.equal(linear(x[:n]), expected[:n])
    finally:
        choose(kernel_sets()[0])
    exact = x @ linear.dense().T + linear.bias
    assert (expected - exact).norm() / exact.norm() < 0.01


def test_round_trip_and_refusal():
    linear = Int4Linear.quantize(random(10, 64))
    assert torch.equal(Int4Linear.from_tensors(linear.tensors())(random(2, 64)), linear(random(2, 64)))
    with pytest.raises(UnsupportedModel, match="int8"):
        Int4Linear.quantize(random(4, 40))
