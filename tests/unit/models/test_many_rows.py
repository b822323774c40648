"""Products of many rows: the same bits on every kernel set, for every form of weights, number of rows and threads."""

from __future__ import annotations

import pytest
import torch

from decodery.core.native.kernels import Form, choose, kernel_sets, library
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.floats import Float4Linear, MXFP4Linear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import BITS, BLOCK, SUPER, SUPER_BYTES, Packed
from decodery.models.native.super_blocks import SuperBlockLinear
from decodery.models.native.ternary import TernaryLinear

FORMS = [Form.ROWS8, Form.ROWS2, *(form for form in BITS if form != Form.CODES4)]


def drawn(form: Form, outputs: int, inputs: int) -> Packed:
    """A layer of random numbers, the largest and smallest among them."""
    torch.manual_seed(int(form))
    if form == Form.ROWS8:
        return Packed(Int8Linear(torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs)))
    if form == Form.ROWS2:
        return Packed(TernaryLinear.of(torch.randint(-1, 2, (outputs, inputs)), torch.rand(outputs)))
    weight = torch.randint(0, 256, (outputs, inputs * BITS[form] // 8), dtype=torch.uint8)
    if form in SUPER_BYTES:
        has_least = form in (Form.SUPER4, Form.SUPER5)
        scales = torch.rand(outputs, inputs // SUPER, 1 + has_least).half()
        low, high, dtype = (0, 64, torch.uint8) if has_least else (-128, 128, torch.int8)
        integers = torch.randint(low, high, (outputs, inputs // BLOCK, 2), dtype=dtype)
        return Packed(SuperBlockLinear(form, weight, scales, integers))
    if form == Form.MXFP4:
        return Packed(MXFP4Linear(weight, torch.randint(110, 140, (outputs, inputs // BLOCK), dtype=torch.uint8)))
    scales = torch.randn(outputs, inputs // BLOCK, 2).half()
    if form == Form.FLOAT4:
        return Packed(Float4Linear(weight, scales.flatten(1), torch.rand(outputs)))
    if form == Form.BLOCKS4:
        return Packed(Int4Linear(weight, scales[..., 0].contiguous(), scales[..., 1].contiguous()))
    return Packed(BlockLinear(weight, scales[..., :1].contiguous() if form == Form.BLOCKS8 else scales))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_kernel_set_gives_the_same_bits(form: Form) -> None:
    """Inputs of 13 groups, or five super-blocks, come in unequal parts; 41 outputs leave a panel unfinished."""
    inputs = 1280 if form in SUPER_BYTES else 832
    layer = drawn(form, 41, inputs)
    x = torch.randn(147, inputs) * torch.logspace(-3, 3, 147)[:, None]
    x[7, 3], x[130] = torch.nan, 0.0
    lib = library()
    assert lib is not None
    choose(kernel_sets()[-1])
    try:
        expected = layer(x)
        assert expected[7].isnan().all() and expected[:7].isfinite().all()
        for name in kernel_sets()[:-1]:
            choose(name)
            for rows, threads in ((16, 1), (31, 3), (47, 1), (75, 2), (147, 2)):
                lib.decodery_threads(threads)
                found = layer(x[:rows]).nan_to_num(0.5)
                assert torch.equal(found, expected[:rows].nan_to_num(0.5)), (name, rows, threads)
    finally:
        choose(kernel_sets()[0])
        lib.decodery_threads(torch.get_num_threads())
