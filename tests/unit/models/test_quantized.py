"""Folders of quantized weights: every published layout against its formula, and its models against `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from decodery.core.native.kernels import Form, choose, kernel_sets
from decodery.models.loaders.load import load
from decodery.models.loaders.quantized.formats import read_format
from decodery.models.loaders.quantized.weight import Tensors, Weight
from decodery.models.loaders.shards import Shards
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from quantized_weights import LAYOUTS, Layout, quantize_folder
from tiny_models import assert_same_logits, make_model, save

MODELS = (
    *("GPTQ 4 bits, act-order", "GPTQ 8 bits", "AWQ gemv", "FP8, blocks", "compressed-tensors W4A16, any zeros"),
    *("compressed-tensors W8A8", "compressed-tensors NVFP4", "Model Optimizer FP8", "bitsandbytes NF4, double"),
)
"""Layouts of which whole models are run."""
OTHERS = {
    "qwen2": "compressed-tensors W8A8",
    "phi3": "FP8, blocks",
    "stablelm": "AWQ gemm",
    "mixtral": "compressed-tensors FP8, channels",
    "qwen3_moe": "compressed-tensors MXFP4",
    "deepseek_v2": "Model Optimizer FP8",
    "falcon_h1, multiplied and normed": "Model Optimizer FP8, channels",
    "gemma3_text": "bitsandbytes FP4",
}
"""Models with biases, fused tensors, rows in another order, experts, latents, factors and tied embeddings."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def model_of(path: Path, dtype: str = "auto") -> Transformer:
    model = load(path, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer)
    return model


def read_weight(folder: Path, layout: Layout, tensors: dict[str, torch.Tensor]) -> Weight:
    """The weight that tensors stand for, from a file."""
    save_file({f"layer.{last}": tensor.contiguous() for last, tensor in tensors.items()}, folder / "model.safetensors")
    form = read_format({"quantization_config": layout.config}, "config.json")
    assert form is not None
    weight = form.weight(Tensors(Shards(folder), "layer."))
    assert weight is not None
    return weight


# --- weights --------------------------------------------------------------------------------------------------------


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
        # The scales of bitsandbytes are products themselves: one rounding less.
        close = 2.0**-23 * wanted[rows].abs() if name == "bitsandbytes int8" else torch.zeros(())
        assert ((found - wanted[rows]).abs() <= close).all()


def test_zeros_of_the_first_gptq_files_are_stored_less_one(tmp_path: Path) -> None:
    layout = LAYOUTS["GPTQ 4 bits"]
    tensors, exact = layout.make(np.random.default_rng(1), 96, 64)
    second = LAYOUTS["GPTQ 4 bits, v2, any zeros"]
    found = read_weight(tmp_path, second, tensors).dense(torch.arange(96)) - torch.from_numpy(exact.copy())
    scales = tensors["scales"].float()[torch.arange(64) // 32].T
    assert torch.allclose(found, scales)


def test_steps_beyond_half_precision_are_not_rounded(tmp_path: Path) -> None:
    """A step of float32, a step too small, and zeros whose product with a step is none."""
    layout = LAYOUTS["compressed-tensors W4A16"]
    tensors, _ = layout.make(np.random.default_rng(1), 96, 64)
    for step, forms in ((0.01, ()), (2.0**-26, ()), (2.0**-10, layout.forms), (8192.0, (Form.BLOCKS4, Form.BLOCKS8))):
        scale = torch.full_like(tensors["weight_scale"], step, dtype=torch.float32)
        weight = read_weight(tmp_path, layout, tensors | {"weight_scale": scale})
        assert weight.forms == (forms if step < 1 else (Form.BLOCKS8,)), step


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


# --- models ---------------------------------------------------------------------------------------------------------


def reference_of(folder: Path, exact: dict[str, torch.Tensor], at: Path) -> transformers.PreTrainedModel:
    """The model of `transformers` in float32, of the same folder with these weights in place of quantized ones."""
    shutil.copytree(folder, at)
    raw = json.loads((at / "config.json").read_text())
    del raw["quantization_config"]
    (at / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    save_file(exact, at / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(at, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_logits_of_transformers(name: str, home: Path, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[name], save(make_model("llama"), tmp_path / "model")
    exact = quantize_folder(folder, layout)
    assert_same_logits(model_of(folder, "float32"), reference_of(folder, exact, tmp_path / "exact"))
    down, wanted = model_of(folder).weights.layers[2].down, exact["model.layers.2.mlp.down_proj.weight"]
    if layout.forms:
        assert not isinstance(down, Dense) and down.form == layout.forms[0]  # type: ignore[attr-defined]
        assert torch.equal(down.dense(), wanted)  # type: ignore[attr-defined]
    else:
        # As `transformers` makes them: rounded once to the type of the folder.
        assert isinstance(down, Dense) and torch.equal(down.weight, wanted.to(layout.dtype))


@pytest.mark.parametrize("case", OTHERS)
def test_other_families_are_read_too(case: str, home: Path, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[OTHERS[case]], save(make_model(case), tmp_path / "model")
    exact = quantize_folder(folder, layout)
    theirs = reference_of(folder, exact, tmp_path / "exact")
    assert_same_logits(model_of(folder, "float32"), theirs)
    # What has a native form keeps it, beside what was not quantized.
    ours = model_of(folder)
    forms = {getattr(layer.down, "form", None) for layer in ours.weights.layers}
    assert not layout.forms or layout.forms[0] in forms
