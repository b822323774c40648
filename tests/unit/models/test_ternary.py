"""Ternary layers: an int8 layer's arithmetic to the bit, from every kernel; files that keep them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decodery.compression import BitNet, transformed
from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.loaders import fused
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import packed_size
from decodery.models.native.ternary import TernaryLinear
from decodery.testing import tiny_transformer


def layer(outputs: int, inputs: int) -> tuple[TernaryLinear, Int8Linear]:
    chance = torch.Generator().manual_seed(outputs)
    trits = torch.randint(-1, 2, (outputs, inputs), generator=chance)
    scale, bias = torch.rand(outputs, generator=chance), torch.randn(outputs, generator=chance)
    return TernaryLinear.of(trits, scale, bias), Int8Linear(trits.to(torch.int8), scale, bias)


@pytest.mark.parametrize("kernels", kernel_sets())
@pytest.mark.parametrize("shape", [(33, 96), (128, 576), (70, 36), (1, 4)])
def test_every_kernel_gives_the_bits_of_int8_for_any_number_of_rows(shape: tuple[int, int], kernels: str) -> None:
    ternary, alike = layer(*shape)
    x = 3 * torch.randn(21, shape[1], generator=torch.Generator().manual_seed(1))
    # The largest activations beside the largest weights: what is summed in 16 bits must have room for them.
    x[4], x[7] = 1.0, -1.0
    expected = alike.portable(x)
    assert torch.equal(ternary.portable(x), expected)
    choose(kernels)
    try:
        for n in (1, 2, 3, 4, 5, 8, 9, 16, 21):
            assert torch.equal(ternary(x[:n]), expected[:n])
    finally:
        choose(kernel_sets()[0])
    exact = x @ ternary.dense().T + ternary.bias
    assert (expected - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("value", [-1, 1, 2])
@pytest.mark.parametrize("kernels", kernel_sets())
def test_sums_do_not_overflow(kernels: str, value: int) -> None:
    """Two bits have room for 2, too, which damaged files may say."""
    trits = torch.full((40, 256), value)
    ternary = TernaryLinear.of(trits, torch.ones(40))
    choose(kernels)
    try:
        assert torch.equal(
            ternary(torch.ones(5, 256)), Int8Linear(trits.to(torch.int8), torch.ones(40)).portable(torch.ones(5, 256))
        )
    finally:
        choose(kernel_sets()[0])


def test_a_weight_takes_two_bits() -> None:
    ternary, _ = layer(64, 128)
    assert packed_size(ternary) == ternary.weight.nbytes == 64 * 128 // 4
    with pytest.raises(UnsupportedModel, match="fours"):
        TernaryLinear.of(torch.zeros(4, 6), torch.ones(4))


def test_copies_are_read_as_they_were_written_and_damaged_ones_are_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, _ = transformed(tiny_transformer(dtype=torch.float32), [BitNet()], ())
    path = tmp_path / "copy.safetensors"
    fused.save(path, model.weights)
    again = fused.read(path, model.config, torch.device("cpu"))
    for before, after in zip(model.weights.layers, again.layers, strict=True):
        assert isinstance(after.down, TernaryLinear)
        assert torch.equal(before.down.dense(), after.down.dense())  # type: ignore[attr-defined]
    for name, change in {
        "layers.0.down.scale": lambda scale: scale[1:],
        "layers.0.down.weight": lambda weight: weight[:, 1:],
        "layers.1.qkv.scale": lambda scale: scale.half(),
    }.items():
        tensors = load_file(path)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, tmp_path / "other.safetensors")
        with pytest.raises(CorruptFile, match="do not fit"):
            fused.read(tmp_path / "other.safetensors", model.config, torch.device("cpu"))
