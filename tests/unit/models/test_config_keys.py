"""Every field of a config.json is read, known to say nothing, or refused; a missing one is what transformers takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from decodery.core.errors import DecoderyError, UnsupportedModel
from decodery.models.config import ModelConfig, Rope
from decodery.models.families.config_json import FAMILIES, read_config
from decodery.models.families.masked import MASKED
from decodery.models.loaders.config_keys import DEFAULTS
from decodery.models.torch.rope import _llama3
from tiny_models import CASES, make_model

OURS = [name for name in FAMILIES if name not in MASKED]
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def written(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """As a config.json has it."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def default(family: str) -> dict[str, Any]:
    config = written(transformers.AutoConfig.for_model(family))
    if family == "starcoder2":
        # Its class names an end of texts that its vocabulary does not have.
        config |= {"bos_token_id": 0, "eos_token_id": 0}
    if family == "lfm2_moe":
        # The class does not say which layers attend.
        config |= {"layer_types": ["conv", "full_attention"] * (config["num_hidden_layers"] // 2)}
    if family == "glm4_moe":
        # Heads of the class are not made of pairs.
        config |= {"head_dim": 128}
    # A mixture that says nothing of it takes none of its experts.
    return config | ({"num_experts_per_tok": 6} if family == "deepseek_v2" else {})


def read(raw: dict[str, Any]) -> ModelConfig:
    """Without the ids of tokens that begin and end texts, which are read with the tokenizer."""
    return replace(read_config(raw), bos_id=None, eos_ids=())


@pytest.mark.parametrize("family", OURS)
def test_default_configurations_of_transformers_are_read_whole(family: str) -> None:
    read(default(family))


@pytest.mark.parametrize("family", OURS)
def test_a_missing_field_is_what_transformers_takes(family: str) -> None:
    """Of every field of the default configuration, and of one of other sizes."""
    case = next(name for name, (own, _) in CASES.items() if own == family)
    for whole in (default(family), written(make_model(case).config)):
        for name in whole:
            if name in ("model_type", *IDS):
                continue
            less = {key: value for key, value in whole.items() if key != name}
            try:
                theirs = written(type(transformers.AutoConfig.for_model(family)).from_dict(less))
            except Exception:
                # Sizes that fit each other no longer.
                continue
            try:
                wanted = read(theirs)
            except DecoderyError as error:
                with pytest.raises(type(error)):
                    read(less)
                continue
            assert read(less) == wanted, name


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_nobody_knows_are_refused_by_their_name(family: str) -> None:
    base = LLADA if family == "llada" else LLADA_MOE if family == "llada_moe" else DEFAULTS[family]
    raw = base | {"model_type": family, "num_experts_per_tok": 2, "mask_token_id": 0}
    if family not in MASKED:
        raw.pop("mask_token_id")
    if family in ("stablelm", "gpt_neox", "gpt2", "mamba2", "zamba2", "llada"):
        raw.pop("num_experts_per_tok")
    raw |= {"head_dim": 128} if family == "glm4_moe" else {}
    raw |= {"moe_intermediate_size": 64} if family == "llada2_moe" else {}
    raw |= {"hybrid_layer_ids": [6]} if family == "zamba2" else {}
    raw |= {"layer_types": ["conv"] * 32} if family == "lfm2_moe" else {}
    read_config(raw | {"clip_qkv": None, "some_switch": False, "_name_or_path": "x", "unsloth_version": "2025.1"})
    read_config(raw | {"is_causal": True})
    changes: list[dict[str, Any]] = [{"clip_qkv": 8.0}, {"some_switch": True}, {"quantization": {"bits": 4}}]
    # Rows of masked models see both ways whatever is said of it.
    changes += [] if family in MASKED else [{"is_causal": False}]
    for change in changes:
        with pytest.raises(UnsupportedModel, match=f"the field {next(iter(change))} = .* is not known here"):
            read_config(raw | change)


def test_nemotrons_layers_are_named_in_three_ways() -> None:
    raw = {
        "model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "intermediate_size": 96, "vocab_size": 288,
    }  # fmt: skip
    kinds = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    named = {"hybrid_override_pattern": "M-*-M"}, {"layers_block_type": kinds}, {"layer_types": kinds}
    first, *rest = (read_config(raw | each) for each in named)
    assert first.num_layers == 5 and first.mlp_layers == (False, True, False, True, False) and rest == [first] * 2


LLADA = {
    "block_type": "llama", "layer_norm_type": "rms", "rope": True, "include_bias": False, "d_model": 64, "n_heads": 4,
    "n_layers": 2, "mlp_hidden_size": 96, "embedding_size": 288, "activation_type": "silu", "weight_tying": False,
}  # fmt: skip
LLADA_MOE = {
    "hidden_size": 64, "expert_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_experts": 8, "vocab_size": 288,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    # What files on the Hub have beside what transformers writes.
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "head_dim": 64,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "torch_dtype": "bfloat16",
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2", "use_mrope": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 21, "attention_dropout": 0.0, "num_key_value_heads": 8,
    },
    "microsoft/Phi-4-mini-instruct": {
        "model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
    "unsloth/gemma-3-270m-it": {
        "model_type": "gemma3_text", "unsloth_fixed": True, "unsloth_version": "2025.8", "_sliding_window_pattern": 6,
        "cache_implementation": "hybrid", "attn_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "n_group": 1,
        "seq_aux": True, "scoring_func": "softmax", "topk_group": 1, "num_experts_per_tok": 6, "pretraining_tp": 1,
    },
    "EleutherAI/pythia-70m": {
        "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True,
        "classifier_dropout": 0.1, "hidden_dropout": 0.0, "intermediate_size": 2048, "hidden_size": 512,
        "num_attention_heads": 8,
    },
    "openai-community/gpt2": {
        "model_type": "gpt2", "n_ctx": 1024, "summary_type": "cls_index", "summary_use_proj": True, "attn_pdrop": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True}}, "summary_proj_to_labels": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_have_beside_is_known(name: str) -> None:
    read_config(PUBLISHED[name])


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"model_type": "llama", "rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "phi3", "full_attn_mod": 2}, "full_attn_mod"),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 32, "sliding_window": 8}, "layer_types"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4]}}, "mrope_section"),
        ({"model_type": "qwen2", "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "new": 1}}, "new"),
        (LLADA_MOE | {"model_type": "llada", "clip_qkv": 8.0}, "clip_qkv"),
        (LLADA | {"model_type": "llada", "clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_what_switches_something_else_on_is_refused(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config({"num_experts_per_tok": 2} | raw if "num_experts" in raw else raw)


def test_norms_and_heads_of_each_family_have_its_own_defaults() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
    known = {"vocab_size": 288, "max_position_embeddings": 128} | sizes
    known["num_key_value_heads"] = 4
    found = {family: read_config(known | {"model_type": family}) for family in ("llama", "phi3", "mixtral", "qwen2")}
    assert {family: each.norm_eps for family, each in found.items()} == {
        "llama": 1e-6, "phi3": 1e-5, "mixtral": 1e-5, "qwen2": 1e-6,
    }  # fmt: skip


def test_harmless_fields_of_published_files_are_read() -> None:
    """LFM2-1.2B's own file, which names its heads twice, and equal factors of rotation, as in Llama 4 Scout's."""
    raw: dict[str, Any] = {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_heads": 32, "num_key_value_heads": 8,
        "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_embedding": True,
        "use_cache": True, "use_pos_enc": True,
    }  # fmt: skip
    assert read_config(raw).num_layers == 16
    for field, wrong in (("num_heads", 16), ("use_pos_enc", False)):
        with pytest.raises(UnsupportedModel, match=field):
            read_config(raw | {field: wrong})


def test_between_equal_factors_of_rotation_nothing_is_blended() -> None:
    rope = Rope(5e5, kind="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_positions=8192)
    plain = torch.tensor([1.0, 1e-2, 6.1 / 8192, 1e-5])
    assert torch.equal(_llama3(rope, plain), plain * torch.tensor([1.0, 1.0, 1 / 16, 1 / 16]))
