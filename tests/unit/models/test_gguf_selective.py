"""GGUF files of Mamba, Falcon-Mamba and Jamba: the logits of `transformers`, also of blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from decodery.core.errors import UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.gguf_hybrids import regular
from decodery.models.loaders.in_place import InPlace
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from selective_gguf import write_selective
from tiny_models import assert_same_logits, make_model, random_ids, reference

# Files do not say by what Falcon-Mamba's steps are normed.
CASES = {"mamba": {}, "falcon_mamba": {"mixer_rms_eps": 1e-6}, "jamba": {}, "jamba, dense": {}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def loaded(path: Path, dtype: str) -> Transformer:
    model = load(path, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer)
    return model


@pytest.mark.parametrize("case", CASES)
def test_files_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    theirs, ids = make_model(case, **CASES[case]), random_ids(16)
    write_selective(tmp_path / "model.gguf", theirs)
    ours = loaded(tmp_path / "model.gguf", "float32")
    assert ours.config.family == case.split(",")[0]
    assert_same_logits(ours, theirs)
    # Channels that decay as others do are seen.
    first, *others = ours.weights.layers
    assert first.decay is not None
    wrong = replace(ours.weights, layers=[replace(first, decay=first.decay.roll(1, 0)), *others])
    logits = Transformer(ours.config, wrong).forward(Batch([Segment(np.arange(16), tokens=ids)])).logits
    assert (logits - reference(theirs, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_read_in_place(case: str, tmp_path: Path) -> None:
    theirs, ids = make_model(case, **CASES[case]), random_ids(16)
    write_selective(tmp_path / "model.gguf", theirs, Kind.Q8_0)
    assert_same_logits(loaded(tmp_path / "model.gguf", "float32"), theirs)
    ours = loaded(tmp_path / "model.gguf", "auto")
    assert ours.capabilities.trees
    # Rows of the first matrix change places, so that it is converted.
    assert all(isinstance(each.output, InPlace) for each in ours.weights.layers)
    logits = ours.forward(Batch([Segment(np.arange(16), tokens=ids)])).logits
    # Rounded rows may take another expert.
    assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).median() > 0.98


def test_layers_of_a_kind_follow_each_other_evenly() -> None:
    for period, first, layers in ((2, 1, 6), (8, 4, 32), (3, 0, 4), (5, 3, 4)):
        found = [layer % period == first for layer in range(layers)]
        period, first = regular("file", found)
        assert [layer % period == first for layer in range(layers)] == found
    assert regular("file", [False] * 4) == (5, 4)
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 2, 3\] do not follow each other evenly"):
        regular("file", [True, False, True, True])
