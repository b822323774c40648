"""Gemma 3n and 4 (text) in the native pass: streams, heads of two widths, shared keys, inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.native.kernels import choose, kernel_sets, library
from decodery.models.batch import Batch, Segment
from decodery.models.config import Rope
from decodery.models.loaders.load import load
from decodery.models.native.stack import NativeStack
from decodery.models.torch.transformer import Transformer
from decodery.testing import check_cache, check_identical
from drawn_models import PARENTS, after, tree_logits
from tiny_models import in_float32, make_model, random_ids, reference, save, without_tokenizer

CASES = ["gemma3n", "gemma3n, other streams", "gemma4", "gemma4, values of keys", "gemma4, experts", "gemma4_unified"]
TOKENS = [11 * node % 90 for node in range(len(PARENTS))]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def loaded(folder: Path, dtype: str) -> Transformer:
    model = load(folder, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer) and isinstance(model._stack, NativeStack)
    return without_tokenizer(model)


@pytest.mark.parametrize("case", CASES)
def test_rows_have_the_same_bits_in_every_tree_chunk_batch_and_kernel_set(case: str, tmp_path: Path) -> None:
    model, lib = loaded(save(make_model(case), tmp_path / "model"), "int8"), library()
    assert lib is not None and model.capabilities.exact_rows
    whole = []
    for name in kernel_sets():
        choose(name)
        for threads in (1, 2):
            lib.decodery_threads(threads)
            whole.append(tree_logits(model, after(model, 60), PARENTS, TOKENS))
    choose(kernel_sets()[0])
    lib.decodery_threads(torch.get_num_threads())
    assert all(torch.equal(each, whole[0]) for each in whole)
    cut = after(model, 1, 30, 2, 27)
    assert torch.equal(tree_logits(model, cut, PARENTS, TOKENS), whole[0])
    path = [0, 2, 5, 6]
    assert torch.equal(tree_logits(model, cut, [-1, 0, 1, 2], [TOKENS[node] for node in path]), whole[0][path])
    other = Segment(np.arange(4), tokens=np.arange(4))
    alone = model.forward(Batch([other])).logits
    together = model.forward(Batch([other, Segment(np.array([60]), tokens=np.array(TOKENS[:1]), cache=cut)])).logits
    assert torch.equal(together[:4], alone) and torch.equal(together[4], whole[0][0])


def test_keys_of_16_bits_lie_side_by_side_and_bytes_are_refused(tmp_path: Path) -> None:
    folder = save(make_model("gemma4, values of keys").to(torch.bfloat16), tmp_path / "model")
    model = loaded(folder, "bfloat16")
    exact = tree_logits(model, after(model, 40), PARENTS, TOKENS)
    model.narrow_caches(torch.float16)
    found = tree_logits(model, after(model, 40), PARENTS, TOKENS)
    assert 0 < (found - exact).abs().max() < 0.02 * exact.abs().max()
    with pytest.raises(SettingsError, match="differ from layer to layer"):
        model.narrow_caches(torch.int8)


def test_long_texts_release_pages_and_drafts_change_nothing(tmp_path: Path) -> None:
    folder = save(make_model("gemma4", max_position_embeddings=1024).to(torch.bfloat16), tmp_path / "model")
    model, ids = loaded(folder, "bfloat16"), random_ids(600)
    expected, cache = reference(in_float32(folder), ids), model.new_cache()
    for begin in range(0, 600, 120):
        logits = model.forward(Batch([Segment.chunk(ids[begin : begin + 120], cache)])).logits
        assert (logits - expected[begin : begin + 120]).abs().max() < 5e-4
        cache.keep(range(120))
        cache.release_passed()
    assert cache.pages.passed
    # After so long a text threads share a row's heads.
    lib = library()
    assert lib is not None
    row = Segment(np.array([600]), tokens=np.array([7]), cache=cache)
    one = model.forward(Batch([row])).logits
    lib.decodery_threads(2)
    two = model.forward(Batch([row])).logits
    lib.decodery_threads(torch.get_num_threads())
    assert torch.equal(one, two)
    assert check_cache(model, programs=1, steps=8) == 0.0
    check_identical(model, [[5, 6, 7, 8] * 4], drafter="ngram", max_new_tokens=6, tested="drafted")


def test_heads_that_do_not_fit_the_rows_of_a_cache_are_run_in_pytorch(tmp_path: Path) -> None:
    config = loaded(save(make_model("gemma4"), tmp_path / "model"), "int8").config
    assert config.native
    for shapes in (((2, 24), (2, 32)) * 3, ((2, 8), (2, 32)) * 3):
        assert not replace(config, head_shapes=shapes).native
    # Angles of one rotation are those of one width.
    assert not replace(config, local_rope=config.rope).native
    assert config.rope_dim(config.rope) == 32 and config.rope_dim(config.local_rope or Rope()) == 16
