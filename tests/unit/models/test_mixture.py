"""Layers of many experts: what they add, in every precision, and how many a pass has to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.config_check import check_config
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.native.stack import NativeStack
from decodery.models.torch.portable import PortableStack
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.testing import check_identical, decode
from decodery.training.draft import check_target
from tiny_models import make_model, random_ids, reference, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3_moe, normed"), tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture
def loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return load(folder, dtype="int8", device="cpu")


def test_experts_in_int8_say_nearly_what_transformers_says_and_are_exact(loaded: LoadedModel) -> None:
    model, ids = loaded.model, random_ids(24)
    together = model.forward(Batch([Segment(np.arange(24), ids)])).logits
    expected = reference(make_model("qwen3_moe, normed"), ids)
    assert torch.nn.functional.cosine_similarity(together, expected).min() > 0.99
    cache, rows = model.new_cache(), []
    for chunk in (ids[:5], ids[5:6], ids[6:]):
        rows.append(model.forward(Batch([Segment.chunk(chunk, cache)])).logits)
        cache.keep(range(len(chunk)))
    assert model.capabilities.exact_rows and torch.equal(torch.cat(rows), together)
    drafter = PromptLookup(length=4)
    check_identical(model, [[5, 6, 7] * 3], drafter=drafter, seeds=(0,), max_new_tokens=6, tested="drafted")


@pytest.mark.parametrize("case", ["qwen2_moe", "glm4_moe, in groups", "mixtral", "gpt_oss", "llama4_text"])
def test_one_native_pass_gives_the_bits_of_pytorch_alone(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    model, ids = load(save(make_model(case), tmp_path / "model"), dtype="int8", device="cpu").model, random_ids(24)
    assert isinstance(model, Transformer) and isinstance(model._stack, NativeStack)
    taps = ("resid_post.0", "attn_out.1", "mlp_out.2")
    with mock.patch("decodery.models.torch.transformer.runs_natively", lambda config: False):
        alone = Transformer(model.config, model.weights)
    found, expected = (each.forward(Batch([Segment(np.arange(24), ids)]), taps=taps) for each in (model, alone))
    assert torch.equal(found.logits, expected.logits) and type(alone._stack) is PortableStack
    for tap in taps:
        assert torch.equal(found.hidden[tap], expected.hidden[tap])


def test_an_expert_is_laid_out_when_it_is_first_taken(loaded: LoadedModel) -> None:
    model = loaded.model
    assert isinstance(model, Transformer) and isinstance(model._stack, NativeStack)
    experts = model._stack.experts[0]
    first = model.forward(Batch([Segment(np.zeros(1, int), random_ids(1))])).logits
    taken = experts.laid_out
    assert len(taken) == model.config.experts_per_token < model.config.experts and not experts.whole
    assert torch.equal(model.forward(Batch([Segment(np.zeros(1, int), random_ids(1))])).logits, first)
    assert experts.laid_out == taken


def test_a_pass_says_how_many_experts_its_rows_had_read(loaded: LoadedModel) -> None:
    model, ids = loaded.model, random_ids(12)
    alone = [model.forward(Batch([Segment(np.zeros(1, int), ids[[n]])])).costs[0].experts for n in range(12)]
    layers, each = model.config.num_layers, model.config.experts_per_token
    assert alone == [layers * each] * 12
    # Rows that do not see each other take the experts they take alone: of all, each counts once.
    apart = Segment(np.zeros(12, int), ids, mask=np.eye(12, dtype=bool))
    (many,) = model.forward(Batch([apart])).costs
    assert layers * each < many.experts <= layers * model.config.experts
    parts = model.forward(Batch([Segment(np.zeros(1, int), ids[:1]), Segment(np.zeros(1, int), ids[1:2])])).costs
    assert [cost.experts for cost in parts] == alone[:2]
    (plain,) = decode(model, [[1, 2, 3]], max_new_tokens=6)
    assert plain.trace.ledger.counts["experts"] >= layers * each * 6


def test_what_cannot_be_done_with_experts_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(SettingsError, match="many experts"):
        check_target(loaded)
    for change in ({"experts_per_token": 0}, {"experts_per_token": 7}):
        with pytest.raises(CorruptFile, match="experts cannot be taken"):
            check_config(replace(loaded.model.config, **change), "here")
