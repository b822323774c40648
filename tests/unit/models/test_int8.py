"""Int8 linear layers: close to the layer they come from, exact and independent of other rows."""

from __future__ import annotations

import pytest
import torch

from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.native.int8 import Int8Linear, quantize_rows


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["portable", *kernel_sets()])
def apply(request):
    if request.param == "portable":
        yield Int8Linear.portable
        return
    choose(request.param)
    yield lambda linear, rows: linear(rows)
    choose(kernel_sets()[0])


@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (32, 64), (96, 100), (130, 576)])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 21])
def test_equals_the_sum_written_out(shape, rows, apply):
    """Against integer arithmetic in float64, group by group."""
    linear = Int8Linear.quantize(random(*shape), random(shape[0], seed=1))
    x = random(rows, shape[1], seed=2)
    whole, scale = quantize_rows(x)
    weight = torch.nn.functional.pad(linear.weight.double(), (0, -shape[1] % 64)).view(shape[0], -1, 64)
    sums = torch.einsum("ngk,ogk->nog", whole.double(), weight)
    assert torch.equal(sums, sums.round())
    expected = torch.zeros(rows, shape[0])
    for group in range(sums.shape[2]):
        expected = expected + sums[..., group].float() * scale[:, group, None]
    assert torch.equal(apply(linear, x), expected * linear.scale + linear.bias)


def test_row_does_not_depend_on_other_rows(apply):
    linear, x = Int8Linear.quantize(random(70, 130)), random(40, 130, seed=3)
    together = apply(linear, x)
    for n in (1, 2, 5, 7, 13):
        assert torch.equal(apply(linear, x[:n]), together[:n])


def test_is_close_to_the_layer_it_comes_from(apply):
    weight, bias, x = random(200, 512), random(200, seed=1), random(16, 512, seed=2)
    linear = Int8Linear.quantize(weight, bias)
    assert (apply(linear, x) - x @ weight.T - bias).norm() / (x @ weight.T).norm() < 0.01


def test_an_outlier_spoils_its_own_group_only(apply):
    """The error of 1e4 in one of eight groups of 64 inputs is that of one group, not of the row."""
    linear, x = Int8Linear.quantize(random(200, 512)), random(16, 512, seed=2)
    x[:, 7] = 1e4
    weight = linear.weight.float() * linear.scale[:, None]
    exact_elsewhere = x[:, 64:] @ weight[:, 64:].T
    x_group = torch.cat((x[:, :64], torch.zeros(16, 448)), dim=1)
    elsewhere = apply(linear, x) - apply(linear, x_group)
    assert (elsewhere - exact_elsewhere).norm() / exact_elsewhere.norm() < 0.02


def test_extremes(apply):
    """All products at their largest do not overflow; zero rows and zero weights give the bias."""
    weight = torch.ones(40, 320)
    weight[5] = 0.0
    linear = Int8Linear.quantize(weight, torch.arange(40.0))
    x = torch.stack((torch.full((320,), -3.0), torch.zeros(320), torch.full((320,), 1e-38)))
    y = apply(linear, x)
    assert torch.allclose(y[0], torch.where(torch.arange(40) == 5, 0.0, -960.0) + torch.arange(40.0), rtol=1e-5)
    assert torch.equal(y[1], torch.arange(40.0))
    assert torch.equal(y[2], torch.arange(40.0))


def test_bad_values_reach_the_result(apply):
    linear, x = Int8Linear.quantize(random(40, 64)), random(3, 64, seed=1)
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    y = apply(linear, x)
    assert y[0].isfinite().all() and y[1:].isnan().all()


def test_tensors_round_trip():
    linear = Int8Linear.quantize(random(10, 20), random(10, seed=1))
    again = Int8Linear.from_tensors(linear.tensors())
    assert torch.equal(again(random(2, 20)), linear(random(2, 20)))
    assert set(Int8Linear.quantize(random(10, 20)).tensors()) == {"weight", "scale"}


def test_no_rows():
    assert Int8Linear.quantize(random(10, 20))(torch.zeros(0, 20)).shape == (0, 10)
