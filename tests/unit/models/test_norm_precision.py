"""Norms that a loader changes stay in float32 in models of 16 bits; a model's precision is not read off them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from tiny_models import in_float32, make_model, random_ids, reference, save

IDS = random_ids(40)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def model_of(folder: Path, dtype: str) -> Transformer:
    model = load(folder, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer)
    return model


def logits(model: Transformer) -> torch.Tensor:
    return model.forward(Batch([Segment.chunk(IDS, model.new_cache())])).logits


def rounded_again(model: Transformer) -> Transformer:
    """The same model with all of its norms in bfloat16."""
    layers = [
        replace(
            layer,
            **{
                name: part.bfloat16()
                for name, part in vars(layer).items()
                if name.endswith("norm") and part is not None
            },
        )
        for layer in model.weights.layers
    ]
    return Transformer(model.config, replace(model.weights, layers=layers, norm=model.weights.norm.bfloat16()))


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_next", "granite"])
def test_norms_of_16_bits_are_those_of_float32(case: str, home: Path, tmp_path: Path) -> None:
    folder = save(make_model(case).to(torch.bfloat16), tmp_path / "model")
    whole, half = model_of(folder, "float32"), model_of(folder, "bfloat16")
    assert half.weights.dtype == torch.bfloat16
    (file,) = home.rglob("bfloat16.safetensors")
    found, wanted = load_file(file), load_file(file.with_name("float32.safetensors"))
    norms = [name for name in found if name.endswith("norm.weight") and found[name].dtype == torch.float32]
    assert norms and "norm.weight" in norms
    assert all(torch.equal(found[name], wanted[name]) for name in norms)
    exact = logits(whole)
    assert (logits(half) - exact).abs().max() < 1e-4
    assert (logits(rounded_again(half)) - exact).abs().max() > 1e-3


def test_a_pass_in_16_bits_norms_as_transformers_does(home: Path, tmp_path: Path) -> None:
    theirs = make_model("gemma3_text").to(torch.bfloat16)
    folder = save(theirs, tmp_path / "model")
    half = model_of(folder, "bfloat16")
    half._stack, half.dtype = None, half.weights.dtype
    half.cache_dtype = half.dtype
    exact = reference(in_float32(folder), IDS)
    ours, known = (float((each - exact).norm()) for each in (logits(half), reference(theirs, IDS)))
    assert ours < 1.2 * known
