"""GGUF files of other families than Llama's, Qwen's and Gemma 3: the logits of `transformers`, also of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.in_place import InPlace, MXFP4InPlace
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer, runs_natively
from decodery.models.torch.weights import Dense
from dense_gguf import write_dense
from tiny_models import CASES, assert_same_logits, make_model, random_ids, reference

_LLAMA4 = {
    **{"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "attn_temperature_tuning": True,
}
_SCALED = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"mscale": 0.7, "mscale_all_dim": 0.7},
}
WRITTEN = {
    **{
        case: {} for case in CASES if CASES[case][0] in ("gemma", "phi3", "phi", "olmo2", "olmo3", "granite", "exaone4")
    },
    **{case: {} for case in ("ernie4_5", "glm4", "glm4, all turned", "hunyuan_v1_dense", "seed_oss")},
    **{case: {} for case in ("starcoder2", "starcoder2, no biases")},
    **{
        case: {}
        for case in (
            "lfm2",
            "lfm2, wide rows",
            "mistral, no window",
            "qwen2_moe",
            "qwen3_moe, normed",
            "glm4_moe",
            "glm4_moe, in groups",
            "gpt_oss",
            "mixtral",
            "qwen3_5_moe",
            "granitemoehybrid",
            "granitemoehybrid, dense, rotated",
            "lfm2_moe",
            "olmoe",
            "granitemoe",
            "granitemoeshared",
        )
    },
    "ministral3": {},
    **{case: {} for case in ("deepseek_v2", "deepseek_v2, in groups", "deepseek_v3", "glm4_moe_lite")},
    "deepseek_v2, queries in two steps, yarn": {"rope_parameters": _SCALED},
    "llama4_text": {"num_hidden_layers": 4, **_LLAMA4},
    "llama4_text, dense layers between": {"use_qk_norm": True, "no_rope_layers": None, **_LLAMA4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3n": {},
    "gemma3n, other streams": {"altup_correct_scale": True},
    **{case: {} for case in ("gemma4", "gemma4, values of keys", "gemma4, experts")},
    "lfm2_moe, untied, not normed": {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "nemotron_h": {"time_step_min": 1e-30},
    "nemotron_h, experts": {"time_step_min": 1e-30, "n_group": 1, "topk_group": 1},
    "qwen3_next, biases, yarn": {"norm_topk_prob": True},
    "qwen3_next": {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
    "qwen3_5": {"linear_value_head_dim": 16},
    "qwen3_5, tied": {"linear_num_value_heads": 2},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
}
"""By case, what a file cannot say."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("case", WRITTEN)
def test_files_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = make_model(case, **WRITTEN[case])
    write_dense(tmp_path / "model.gguf", theirs)
    ours = load(tmp_path / "model.gguf", dtype="float32", device="cpu").model
    assert isinstance(ours, Transformer)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("phi3, half turned, slides", Kind.Q8_0),
        ("glm4", Kind.Q4_0),
        ("smollm3", Kind.Q4_1),
        ("gemma", Kind.Q5_0),
        ("exaone4", Kind.Q8_0),
        ("granite", Kind.Q4_0),
        ("hunyuan_v1_dense", Kind.Q8_0),
        ("qwen3_moe, normed", Kind.Q8_0),
        ("qwen2_moe", Kind.Q4_0),
        ("glm4_moe", Kind.Q5_0),
        ("qwen3_next", Kind.Q4_0),
        ("qwen3_5", Kind.Q8_0),
    ],
)
def test_blocks_are_read_in_place_in_the_order_of_the_rotation(case: str, kind: Kind, tmp_path: Path) -> None:
    theirs = make_model(case, **WRITTEN.get(case, {}))
    write_dense(tmp_path / "model.gguf", theirs, kind)
    exact = load(tmp_path / "model.gguf", dtype="float32", device="cpu").model
    assert_same_logits(exact, theirs)
    ours = load(tmp_path / "model.gguf", device="cpu").model
    assert isinstance(ours, Transformer) and (runs_natively(ours.config) or ours.config.keeps_order)
    assert all(isinstance(layer.qkv, InPlace) and isinstance(layer.gate_up, InPlace) for layer in ours.weights.layers)
    ids = random_ids(16)
    assert all(isinstance(layer.out_gate, InPlace | None) for layer in ours.weights.layers)
    together = ours.forward(Batch([Segment(np.arange(16), ids)])).logits
    near = torch.nn.functional.cosine_similarity(together, reference(theirs, ids))
    # Rounded rows may take another expert, and states carry on what is rounded.
    assert (near.median() if ours.config.experts or ours.config.keeps_order else near.min()) > 0.98


def test_experts_of_gpt_oss_may_have_four_bits(tmp_path: Path) -> None:
    theirs = make_model("gpt_oss")
    write_dense(tmp_path / "model.gguf", theirs, experts=Kind.MXFP4)
    exact = load(tmp_path / "model.gguf", dtype="float32", device="cpu").model
    assert_same_logits(exact, theirs)
    ours = load(tmp_path / "model.gguf", device="cpu").model
    assert isinstance(ours, Transformer) and isinstance(exact, Transformer)
    for layer, same in zip(ours.weights.layers, exact.weights.layers, strict=True):
        for linear, dense in ((layer.gate_up, same.gate_up), (layer.down, same.down)):
            assert isinstance(linear, MXFP4InPlace) and isinstance(dense, Dense)
            assert torch.equal(linear.dense(), dense.weight)
    ids = random_ids(16)
    near = torch.nn.functional.cosine_similarity(
        ours.forward(Batch([Segment(np.arange(16), ids)])).logits, reference(theirs, ids)
    )
    assert near.median() > 0.98


@pytest.mark.parametrize(
    ("case", "metadata", "named"),
    [
        ("granite", {"rope__scaling__finetuned": False}, "rope.scaling.finetuned"),
        ("granite", {"deepstack_scale": 2}, "deepstack_scale"),
        ("olmo2", {"attention__temperature_scale": 0.1}, "temperature_scale"),
    ],
)
def test_what_is_not_known_is_refused_by_name(case: str, metadata: dict, named: str, tmp_path: Path) -> None:
    write_dense(tmp_path / "model.gguf", make_model(case), **metadata)
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path / "model.gguf", device="cpu")


def test_parts_in_one_tensor_must_fill_it(tmp_path: Path) -> None:
    theirs = make_model("phi3")
    theirs.config.intermediate_size = 90
    write_dense(tmp_path / "model.gguf", theirs)
    with pytest.raises(CorruptFile, match="has 192 rows, and should have 180"):
        load(tmp_path / "model.gguf", device="cpu")
