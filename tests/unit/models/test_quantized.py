"""Quantized weights: every published layout against its formula, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form, choose, kernel_sets
from decodery.models.loaders.quantized.formats import FORMATS, read_format
from decodery.models.loaders.quantized.weight import Tensors, Weight
from decodery.models.loaders.shards import Shards
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import PANEL, panel_bytes
from decodery.models.native.reordered import ReorderedLinear
from quantized_weights import LAYOUTS, Layout

REORDERED = ("bitsandbytes int8", "compressed-tensors NVFP4", "Model Optimizer NVFP4")


def read_weight(folder: Path, layout: Layout, tensors: dict[str, torch.Tensor]) -> Weight:
    """The weight that tensors stand for, from a file."""
    save_file({f"layer.{last}": tensor.contiguous() for last, tensor in tensors.items()}, folder / "model.safetensors")
    form = read_format({"quantization_config": layout.config}, "config.json")
    assert form is not None
    weight = form.weight(Tensors(Shards(folder), "layer."))
    assert weight is not None
    return weight


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_what_the_formula_says(name: str, tmp_path: Path) -> None:
    """To the bit in float32, in any rows, and so in every native form that they fit."""
    layout = LAYOUTS[name]
    tensors, exact = layout.make(np.random.default_rng(1), 96, 64)
    weight, wanted = read_weight(tmp_path, layout, tensors), torch.from_numpy(exact.copy())
    assert weight.shape == (96, 64) and weight.forms == layout.forms
    assert torch.equal(weight.dense(torch.arange(96)), wanted)
    rows = torch.tensor([95, 3, 3, 40])
    assert torch.equal(weight.dense(rows), wanted[rows])
    for form in layout.forms:
        found = weight.layer(rows, form).dense()
        if weight.columns is not None:
            found = found[:, weight.columns.argsort()]
        # Where scales are products themselves, they are multiplied in another order.
        close = 2.0**-22 * wanted[rows].abs() if name in REORDERED else torch.zeros(())
        assert ((found - wanted[rows]).abs() <= close).all()


def test_zeros_of_the_first_gptq_files_are_stored_less_one(tmp_path: Path) -> None:
    layout = LAYOUTS["GPTQ 4 bits"]
    tensors, exact = layout.make(np.random.default_rng(1), 96, 64)
    second = LAYOUTS["GPTQ 4 bits, v2, any zeros"]
    found = read_weight(tmp_path, second, tensors).dense(torch.arange(96)) - torch.from_numpy(exact.copy())
    scales = tensors["scales"].float()[torch.arange(64) // 32].T
    assert torch.allclose(found, scales)


@pytest.mark.parametrize(
    "name", ["compressed-tensors W8A8", "compressed-tensors W4A16", "compressed-tensors FP8, channels"]
)
def test_zeros_that_are_written_for_symmetric_weights_are_none(name: str, tmp_path: Path) -> None:
    tensors, exact = LAYOUTS[name].make(np.random.default_rng(1), 96, 64)
    kind = torch.float8_e4m3fn if "FP8" in name else torch.int8
    zeros = {"weight_zero_point": torch.zeros_like(tensors["weight_scale"]).to(kind)}
    weight = read_weight(tmp_path, LAYOUTS[name], tensors | zeros)
    assert torch.equal(weight.dense(torch.arange(96)), torch.from_numpy(exact.copy()))
    assert "weight_zero_point" in weight.names
    zeros["weight_zero_point"].view(torch.uint8)[3] = 1
    with pytest.raises(CorruptFile):
        read_weight(tmp_path, LAYOUTS[name], tensors | zeros)


def test_codes_may_be_stored_as_words_of_another_type(tmp_path: Path) -> None:
    layout = LAYOUTS["bitsandbytes NF4"]
    tensors, exact = layout.make(np.random.default_rng(1), 96, 64)
    words = tensors["weight"].flatten().view(torch.bfloat16)[:, None]
    found = read_weight(tmp_path, layout, tensors | {"weight": words}).dense(torch.arange(96))
    assert torch.equal(found, torch.from_numpy(exact.copy()))


def test_steps_beyond_half_precision_are_not_rounded(tmp_path: Path) -> None:
    """A step of float32, a step too small, and zeros whose product with a step is none."""
    layout = LAYOUTS["compressed-tensors W4A16"]
    tensors, _ = layout.make(np.random.default_rng(1), 96, 64)
    for step, forms in ((0.01, ()), (2.0**-26, ()), (2.0**-10, layout.forms), (8192.0, (Form.BLOCKS4, Form.BLOCKS8))):
        scale = torch.full_like(tensors["weight_scale"], step, dtype=torch.float32)
        weight = read_weight(tmp_path, layout, tensors | {"weight_scale": scale})
        assert weight.forms == (forms if step < 1 else (Form.BLOCKS8,)), step


@pytest.mark.parametrize(
    "name",
    ["compressed-tensors MXFP4", "Model Optimizer NVFP4", "FP8, a tensor's scale", "bitsandbytes NF4, double"],
)
def test_every_kernel_multiplies_floats_to_the_same_bits_for_any_number_of_rows(name: str, tmp_path: Path) -> None:
    """33 outputs leave a panel nearly empty, and 192 inputs a group of 128."""
    tensors, exact = LAYOUTS[name].make(np.random.default_rng(1), 33, 192)
    (form,) = LAYOUTS[name].forms
    linear = read_weight(tmp_path, LAYOUTS[name], tensors).layer(torch.arange(33), form)
    linear.bias = torch.randn(33, generator=torch.Generator().manual_seed(1))
    x = torch.randn(21, 192, generator=torch.Generator().manual_seed(2))
    expected = linear.portable(x)
    for kernels in kernel_sets():
        choose(kernels)
        try:
            packed = dataclasses.replace(linear)
            for n in (1, 2, 3, 5, 8, 9, 21):
                assert torch.equal(packed(x[:n]), expected[:n]), (kernels, n)
        finally:
            choose(kernel_sets()[0])
    product = x.double() @ torch.from_numpy(exact.copy()).double().T + linear.bias
    # E2M1 is multiplied with rows of eight bits, the others with rows as they are.
    assert (expected - product).norm() / product.norm() < (0.01 if form in (Form.FLOAT4, Form.MXFP4) else 1e-6)


@pytest.mark.parametrize("name", ["GPTQ 4 bits, act-order", "GPTQ 8 bits, act-order"])
def test_every_kernel_reads_columns_in_their_order(name: str, tmp_path: Path) -> None:
    """To the bit what PyTorch makes of it; 96 inputs leave a group half empty. Another order gives other numbers."""
    tensors, exact = LAYOUTS[name].make(np.random.default_rng(1), 64, 96)
    weight = read_weight(tmp_path, LAYOUTS[name], tensors)
    assert weight.columns is not None
    inner = weight.layer(torch.arange(64), weight.forms[0])
    assert isinstance(inner, Int4Linear | BlockLinear)
    linear = ReorderedLinear(inner, weight.columns.int())
    assert torch.equal(linear.dense(), torch.from_numpy(exact.copy()))
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(2))
    expected = linear.portable(x)
    for kernels in kernel_sets():
        choose(kernels)
        try:
            packed = dataclasses.replace(linear)
            for n in (1, 2, 9, 21):
                assert torch.equal(packed(x[:n]), expected[:n]), (kernels, n)
        finally:
            choose(kernel_sets()[0])
    product = x.double() @ torch.from_numpy(exact.copy()).double().T
    assert (expected - product).norm() / product.norm() < 0.02
    wrong = ReorderedLinear(inner, weight.columns.argsort().int()).portable(x)
    assert (wrong - product).norm() / product.norm() > 0.5


def test_int8_weights_of_minus_128_fit_every_kernel() -> None:
    """The largest products of one sign that there are."""
    x = torch.ones(9, 96)
    x[1::2] = -1
    layer = Int8Linear(torch.full((33, 96), -128, dtype=torch.int8), torch.rand(33) + 0.5)
    expected = layer.portable(x)
    for kernels in kernel_sets():
        choose(kernels)
        try:
            packed = Int8Linear(layer.weight, layer.scale)
            for n in (1, 2, 3, 4, 9):
                assert torch.equal(packed(x[:n]), expected[:n]), (kernels, n)
        finally:
            choose(kernel_sets()[0])


def test_experts_of_gpt_oss_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """[experts, out, groups, 16] to [experts * out, in], which transformers turns around."""
    from transformers.integrations.mxfp4 import dequantize_convertops

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 10, 2), generator=generator, dtype=torch.uint8)
    scales[0, 0, 0], scales[0, 0, 1] = 0, 253
    save_file({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}, tmp_path / "model.safetensors")
    form = read_format({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}, "c")
    assert form is not None
    weight = form.weight(Tensors(Shards(tmp_path), "experts.down_proj"))
    assert weight is not None and weight.shape == (30, 64)
    expected = dequantize_convertops(blocks, scales, torch.float32).transpose(1, 2).reshape(30, 64)
    assert torch.equal(weight.dense(torch.arange(30)), expected)


@pytest.mark.parametrize("name", ["FP8, blocks of 48 by 40", "FP8, blocks, powers of two", "FP8, a tensor's scale"])
def test_fp8_is_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, _ = LAYOUTS[name].make(np.random.default_rng(4), 96, 80)
    scale = next(tensors[last] for last in ("weight_scale_inv", "weight_scale") if last in tensors)
    expected = Fp8Dequantize(None)._dequantize_one(tensors["weight"], scale, torch.float32)
    assert torch.equal(read_weight(tmp_path, LAYOUTS[name], tensors).dense(torch.arange(96)), expected)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["GPTQ 8 bits", "AWQ gemm", "FP8, blocks", "Model Optimizer NVFP4", "bitsandbytes NF4"]
)
def test_a_field_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="the field secret is not known here"):
        read_format({"quantization_config": LAYOUTS[name].config | {"secret": 1}}, "config.json")


_W4 = LAYOUTS["compressed-tensors W4A16"].config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "quark"}, "quantized by quark are not read here: gptq, awq, fp8"),
        ({"bits": 4}, "quantized by an unnamed method"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ weights of 5 bits are not read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "laid out as 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits are not read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "laid out as 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "laid out as 'llm-awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quantized by 'W4A8_AWQ' are not read"),
        (_W4 | {"format": "marlin-24"}, "the format 'marlin-24' is not read"),
        (_W4 | {"quantization_status": "frozen"}, "whose status is 'frozen'"),
        (_W4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (_W4 | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (_W4 | {"config_groups": {"a": {"weights": {"num_bits": 4, "secret": 1}}}}, "the field secret"),
    ],
)
def test_other_quantized_weights_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_format({"quantization_config": config}, "config.json")


def _state(tensors: dict[str, torch.Tensor], **changed: Any) -> dict[str, torch.Tensor]:
    """Tensors of bitsandbytes that say something else of themselves."""
    name = "weight.quant_state.bitsandbytes__nf4"
    raw = json.loads(bytes(tensors[name].tolist())) | changed
    return {name: torch.tensor(list(json.dumps(raw).encode()), dtype=torch.uint8)}


DAMAGED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "another type": ("GPTQ 4 bits", lambda t: {"qweight": t["qweight"].float()}),
    "too few steps": ("GPTQ 4 bits", lambda t: {"scales": t["scales"][:1]}),
    "a group that is none": ("GPTQ 4 bits", lambda t: {"g_idx": t["g_idx"] + 1}),
    "a group below zero": ("GPTQ 4 bits", lambda t: {"g_idx": t["g_idx"] - 1}),
    "too few zeros": ("AWQ gemm", lambda t: {"qzeros": t["qzeros"][:, :1]}),
    "rows that are not wide enough": ("AWQ gemv", lambda t: {"scales": t["scales"][:, :8]}),
    "too few blocks": (
        "FP8, blocks of 48 by 40", lambda t: {"weight_scale_inv": t["weight_scale_inv"][:, :1].repeat(1, 3)},
    ),
    "integers for scales": ("FBGEMM FP8", lambda t: {"weight_scale": t["weight_scale"].int()}),
    "a shape that is too large": (
        "compressed-tensors W4A16", lambda t: {"weight_shape": torch.tensor([96, 1 << 40])},
    ),
    "bits that no group has": ("compressed-tensors W4A16", lambda t: LAYOUTS["compressed-tensors W8A16"].make(
        np.random.default_rng(0), 96, 64)[0]),
    "zeros that no group has": (
        "compressed-tensors W8A8", lambda t: {"weight_zero_point": torch.ones(96, 1, dtype=torch.int8)},
    ),
    "other groups": ("compressed-tensors W4A16", lambda t: {"weight_scale": t["weight_scale"][:, :1].repeat(1, 4)}),
    "scales of another kind": ("compressed-tensors NVFP4", lambda t: {"weight_scale": t["weight_scale"].float()}),
    "codes that are missing": ("bitsandbytes NF4", lambda t: {"weight": t["weight"][:-1]}),
    "a matrix that is too large": ("bitsandbytes NF4", lambda t: _state(t, shape=[1 << 30, 1 << 30])),
    "no blocks": ("bitsandbytes NF4", lambda t: _state(t, blocksize=0)),
    "another kind of codes": ("bitsandbytes NF4", lambda t: _state(t, quant_type="fp4")),
    "no JSON": ("bitsandbytes NF4", lambda t: {
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_do_not_fit_together_are_refused(case: str, tmp_path: Path) -> None:
    name, change = DAMAGED[case]
    tensors, _ = LAYOUTS[name].make(np.random.default_rng(1), 96, 64)
    with pytest.raises(CorruptFile):
        read_weight(tmp_path, LAYOUTS[name], tensors | change(tensors))


def test_an_order_that_no_tensor_says_is_refused(tmp_path: Path) -> None:
    for name in ("GPTQ 4 bits", "GPTQ 4 bits, act-order"):
        tensors, exact = LAYOUTS[name].make(np.random.default_rng(1), 96, 64)
        del tensors["g_idx"]
        if name == "GPTQ 4 bits":
            found = read_weight(tmp_path, LAYOUTS[name], tensors).dense(torch.arange(96))
            assert torch.equal(found, torch.from_numpy(exact.copy()))
        else:
            with pytest.raises(UnsupportedModel, match="no tensor g_idx"):
                read_weight(tmp_path, LAYOUTS[name], tensors)


def documented() -> str:
    """The table of layouts: what each is kept as, and how many bits a weight takes in memory."""
    kept = {
        Form.BLOCKS4: "as stored, blocks of 4-bit integers",
        Form.BLOCKS5: "as stored, blocks of 5-bit integers",
        Form.BLOCKS8: "as stored, blocks of 8-bit integers",
        Form.ROWS8: "as stored, int8 rows",
        Form.FLOAT4: "as stored, E2M1 with steps of 16",
        Form.MXFP4: "as stored, E2M1 with powers of two of 32",
        Form.FLOAT8: "as stored, E4M3 with scales of 128",
        Form.CODES4: "as stored, NF4 with scales of 64",
    }
    lines = ["| layout | kept as | bits per weight |", "|---|---|---|"]
    for name, layout in LAYOUTS.items():
        form = layout.forms[0] if layout.forms else Form.BFLOAT16
        # Of a panel of a layer of 4096 inputs.
        bits = 8 * panel_bytes(form, 4096) / (PANEL * 4096)
        said = kept.get(form, "made 16 bits") + (", sorted by groups" if "act-order" in name else "")
        lines.append(f"| {name} | {said} | {bits:.3g} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_says_how_each_layout_is_kept() -> None:
    page = Path(__file__).parents[3] / "docs" / "supported-models.md"
    assert documented() in page.read_text()
    methods = {method for each in FORMATS for method in each.methods}
    assert {layout.config["quant_method"] for layout in LAYOUTS.values()} == methods - {"mxfp4", "modelopt_fp4"}
