"""Families in the one native pass: logits of checkpoints of 16 bits are those of `transformers` in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.native.stack import NativeStack
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Layer
from tiny_models import assert_same_logits, in_float32, make_model, random_ids, reference, save

CASES = [
    "deepseek_v2", "deepseek_v3", "deepseek_v2, queries in two steps, yarn", "glm4_moe_lite, in groups, other pairs",
    "gemma3n", "gemma3n, other streams", "gemma4", "gemma4, values of keys", "gemma4, experts", "gemma4_unified",
    "falcon_h1", "nemotron_h", "nemotron_h, experts", "mamba", "falcon_mamba", "jamba", "jamba, dense",
]  # fmt: skip


def changed(layer: Layer) -> Layer:
    """Heads that read each other's matrices, or a stream that is scaled otherwise, or other states."""
    if layer.heads_up is not None:
        return replace(layer, heads_up=layer.heads_up.roll(len(layer.heads_up) // 4, 0))
    if layer.stream_correct is not None:
        return replace(layer, stream_correct=1.05 * layer.stream_correct)
    if layer.scale is not None:
        return replace(layer, scale=1.05 * layer.scale)
    assert layer.skip is not None
    return replace(layer, skip=1.2 * layer.skip)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    folder, ids = save(make_model(case).to(torch.bfloat16), tmp_path / "model"), random_ids(20)
    model = load(folder, dtype="bfloat16", device="cpu").model
    assert isinstance(model, Transformer) and isinstance(model._stack, NativeStack)
    exact = in_float32(folder)
    assert_same_logits(model, exact, 5e-5)
    # Rows without a cache, too.
    alone, expected = Segment(np.arange(20), tokens=ids), reference(exact, ids)
    assert (model.forward(Batch([alone])).logits - expected).abs().max() < 5e-5
    first, *others = model.weights.layers
    wrong = Transformer(model.config, replace(model.weights, layers=[changed(first), *others]))
    assert (wrong.forward(Batch([alone])).logits - expected).abs().max() > 1e-3
