"""Four-bit floating point: the nearest values, the search for exponent biases, and rounded inputs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decodery.compression import FP4, Int8
from decodery.compression.base import transformed
from decodery.compression.folder import save
from decodery.compression.fp4 import FORMATS, codes, input_levels
from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.loaders.load import load
from decodery.models.native.rounded_inputs import RoundedInputs, nearest, powers
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import tiny_transformer
from tiny_models import tiny_loaded

MODEL = tiny_transformer(0)
TEXTS = [np.random.default_rng(seed).integers(0, 64, 24) for seed in range(6)]


def tensors(model: Transformer) -> list[torch.Tensor]:
    weights = model.weights
    layers = [part for layer in weights.layers for part in vars(layer).values() if part is not None]
    parts = [weights.embedding, weights.norm, weights.head, *layers]
    return [t for part in parts for t in ([part] if isinstance(part, torch.Tensor) else part.tensors().values())]


def test_four_bits_of_floating_point_are_the_nearest_ones() -> None:
    expected = {"E3M0": [0, 1, 2, 4, 8, 16, 32, 64], "E2M1": [0, 1, 2, 3, 4, 6, 8, 12], "E1M2": list(range(8))}
    assert {name: codes(name).tolist() for name in FORMATS} == expected
    numbers = torch.linspace(-15, 15, 3001, dtype=torch.float64)
    for name in FORMATS:
        levels = codes(name).double()
        signed = torch.cat((-levels, levels))
        nearest_one = (numbers[:, None] - signed).abs().amin(dim=1)
        assert torch.allclose((nearest(numbers, codes(name)) - numbers).abs(), nearest_one)
    errors = [
        [part.error for part in transformed(MODEL, [transform], TEXTS)[1].stages[0].parts if part.name != "head"]
        for transform in (FP4(), FP4(format="E2M1"), FP4(format="E2M1", points=1))
    ]
    # The first layer reads the same rows in all three; later ones what the layers before them have made of theirs.
    assert all(a <= b <= c for a, b, c in list(zip(*errors, strict=True))[:1])
    assert sum(errors[0]) < sum(errors[2])


@pytest.mark.parametrize("name", FORMATS)
def test_the_search_tries_the_published_multiples_of_the_exponent_bias(name: str) -> None:
    chance = torch.Generator().manual_seed(5)
    weight = torch.randn(12, 64, generator=chance) ** 3 * torch.logspace(-3, 0, 12)[:, None]
    gram = torch.eye(64)
    made = FP4(format=name).linear(Dense(weight), gram, 4).linear  # type: ignore[arg-type]
    found = made.weight.float() * made.scale[:, None]  # type: ignore[union-attr]
    exponent, mantissa = FORMATS[name]
    for row, coarse in zip(weight, found, strict=True):
        # The paper: max = (2 - 2^-m) 2^(2^e - 1 - b), so the bias b follows from the row's largest weight.
        bias = 2**exponent - row.abs().max().log2() + math.log2(2 - 2.0**-mantissa) - 1
        tried = [(2 - 2.0**-mantissa) * 2 ** (2**exponent - 1 - bias * (0.01 + 1.19 * at / 100)) for at in range(101)]
        steps = [row.abs().max(), *tried]
        errors = [(nearest(row / step, codes(name) / codes(name)[-1]) * step - row).square().sum() for step in steps]
        assert float((coarse - row).square().sum()) == pytest.approx(float(min(errors)), rel=1e-4)
    assert len(FP4().multiples) == 102


@pytest.mark.parametrize("name", FORMATS)
def test_a_bias_of_every_input_is_one_of_all_and_exponents_of_weights(name: str) -> None:
    """Pre-shifted exponent biases: bit for bit what inputs of a table each would give."""
    chance = torch.Generator().manual_seed(2)
    sizes = torch.logspace(-2, 2, 24)
    rows, weight = torch.randn(40, 24, generator=chance) * sizes, torch.randn(16, 24, generator=chance)
    levels, shifts = input_levels(rows.abs().amax(dim=0), name, 1.0)
    exponent, _ = FORMATS[name]
    assert shifts.min() == 0 and shifts.max() == 2**exponent - 1 and float(levels[-1]) == float(rows.abs().max())
    each = [nearest(rows[:, at], levels / 2 ** int(shifts[at])) for at in range(24)]
    expected = torch.nn.functional.linear(torch.stack(each, dim=1), weight)
    layer = RoundedInputs(weight / powers(shifts), levels, shifts)
    assert torch.equal(layer(rows), expected)
    # A layer that does not take the shifts back says something else.
    assert not torch.equal(RoundedInputs(weight, levels, shifts)(rows), expected)
    # Of small inputs shifts leave more: without them the largest one's table is all there is.
    small = [(read - rows)[:, :20].square().sum() for read in (torch.stack(each, dim=1), nearest(rows, levels))]
    assert small[0] < small[1]


def test_a_search_of_inputs_and_weights_in_turns_never_loses() -> None:
    chance = torch.Generator().manual_seed(3)
    rows = torch.randn(200, 32, generator=chance) * torch.logspace(-1, 1, 32)
    whole = Dense(torch.randn(48, 32, generator=chance))
    first = FP4(format="E2M1", points=1, activations=4).rounded(whole, rows)[1]
    errors = [FP4(points=6, activations=4, rounds=rounds).rounded(whole, rows) for rounds in (1, 2, 4)]
    lost = [error for _, error in errors]
    assert first > lost[0] + 1e-3 and lost[0] >= lost[1] >= lost[2]
    told = errors[-1][0](rows) - rows @ whole.weight.T
    assert float(told.square().sum() / (rows @ whole.weight.T).square().sum()) == pytest.approx(lost[2], rel=1e-4)
    copy, report = transformed(MODEL, [FP4(points=3, activations=4, rounds=1)], TEXTS)
    weights_alone = transformed(MODEL, [FP4(points=3)], TEXTS)[1]
    assert report.stages[0].error > weights_alone.stages[0].error and report.bits < 16
    with pytest.raises(UnsupportedModel, match="rounds what its layers read"):
        transformed(copy, [Int8()])


def test_a_file_of_layers_that_round_what_they_read_says_well_how(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    copy, report = transformed(loaded.model, [FP4(points=1, activations=4, rounds=1)], [4 * ids for ids in TEXTS])
    save(tmp_path / "copy", copy, report, loaded)
    path = tmp_path / "copy" / "float32.safetensors"
    whole, stem = load_file(path), "layers.1.down."
    falling, wide = whole[stem + "levels"].flip(0), torch.full_like(whole[stem + "shifts"], 8)
    wrong = ({"levels": falling}, {"shifts": wide}, {"shifts": whole[stem + "shifts"][:-1]}, {"levels": None})
    for change in wrong:
        tensors = whole | {stem + name: part for name, part in change.items()}
        save_file({name: part for name, part in tensors.items() if part is not None}, path)
        with pytest.raises(CorruptFile, match="do not fit their configuration"):
            load(tmp_path / "copy")
