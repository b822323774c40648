"""DeepSeek-V2's attention over latents, its shared and routed experts and its dense layers, beyond equal logits.

That its logits are those of `transformers`, trees and chunks included, is tested with the other families.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.compression import Int8
from decodery.compression.base import transformed
from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.cache.page_pool import SLOTS, page_bytes
from decodery.models.families.config_json import read_config
from decodery.models.loaders.config_check import check_config
from decodery.models.loaders.description import Description
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing import check_identical, check_state, decode
from decodery.training.draft import check_target
from tiny_models import make_model, random_ids, reference, save

CASE = "deepseek_v2, queries in two steps, yarn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(CASE), tmp_path_factory.mktemp("latent") / "model")


def loaded(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> LoadedModel:
    monkeypatch.setenv("DECODERY_HOME", str(home))
    return load(folder, dtype=dtype, device="cpu")


def test_it_keeps_latents_forks_and_counts_the_experts_it_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = loaded(folder, tmp_path, monkeypatch, "float32").model, random_ids(12)
    assert isinstance(model, Transformer) and model.config.latent is not None
    layers, latent = model.config.num_layers, model.config.latent
    cache = model.new_cache()
    scores = model.forward(Batch([Segment.chunk(ids, cache)]))
    # One head of latents a layer, whatever the number of heads, and the rows that many heads share.
    assert cache.pages.slot_bytes * SLOTS == layers * page_bytes(latent.rank + latent.turned, torch.float32)
    mixed, each = layers - sum(model.config.dense_layers), model.config.experts_per_token
    assert mixed * each < scores.costs[0].experts <= mixed * model.config.experts
    cache.keep(range(12))
    fork = cache.fork()
    for text, token in ((cache, 3), (fork, 4)):
        logits = model.forward(Batch([Segment.chunk([token], text)])).logits
        assert (logits[0] - reference(make_model(CASE), np.append(ids, token))[-1]).abs().max() < 1e-4
        text.keep([0])
    drafter = DraftModel(model, length=3)
    check_identical(model, [[5, 6, 7] * 3], drafter=drafter, max_new_tokens=5)
    check_state(model, [[5, 6, 7] * 3], drafter=drafter, max_new_tokens=5, tolerance=1e-4)
    (plain,) = decode(model, [[1, 2, 3]], max_new_tokens=4)
    assert plain.trace.ledger.counts["experts"] >= mixed * each * 4


def test_int8_says_nearly_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = loaded(folder, tmp_path, monkeypatch, "int8").model, random_ids(16)
    logits = model.forward(Batch([Segment(np.arange(16), ids)])).logits
    expected = reference(make_model(CASE), ids)
    # A row whose router was near a tie takes another expert.
    alike = torch.nn.functional.cosine_similarity(logits, expected)
    assert alike.median() > 0.995 and alike.min() > 0.95
    check_identical(model, [[5, 6, 7] * 3], drafter=DraftModel(model, length=3), max_new_tokens=5)


def test_what_is_not_in_the_pass_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_model(CASE).config.to_dict()
    config = read_config(raw)
    path = tmp_path / "description.json"
    path.write_text(Description(config, "float32", {}, None).text())
    assert Description.read(path).config == config
    for change, named in (
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"model_type": "glm4_moe_lite", "topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"qk_rope_head_dim": 7}, "pairs"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"model_type": "minicpm3"}, "minicpm3"),
    ):
        with pytest.raises(UnsupportedModel, match=named):
            read_config(raw | change)
    for wrong in ({"head_dim": 30}, {"dense_layers": (True,)}, {"dense_inner": 0}):
        with pytest.raises(CorruptFile, match="do not fit"):
            check_config(replace(config, **wrong), "here")
    target = loaded(folder, tmp_path / "home", monkeypatch, "float32")
    with pytest.raises(SettingsError, match="many experts"):
        check_target(target)
    with pytest.raises(UnsupportedModel, match=r"cannot be transformed|experts"):
        transformed(target.model, [Int8()])
