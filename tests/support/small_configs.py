"""A tiny random model of every causal class of `transformers` that builds from a small configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tiny_models import VOCAB, randomize

FAMILIES = tuple({CONFIG_MAPPING_NAMES[name]: name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.values())
"""Model types, one for each class of configurations. Names alone, because importing all the classes takes seconds."""
WITH_IMAGES = tuple(name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in FAMILIES)
"""Model types that read images as well, and are no causal class."""
MOST_WEIGHTS = 10_000_000
_LAYERS, _HEADS, _WIDTH, _WINDOW = 2, 4, 32, 6

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 32),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "lru_width"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 2 * _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "mamba_n_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "local_attention"), _WINDOW),
    "attention_chunk_size": 8,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "index_topk", "index_head_dim", "indexer_head_dim"), 8),
    **dict.fromkeys(("indexer_budget", "indexer_compress_ratio", "indexer_n_heads"), 4),
    "indexer_kv_heads": 1,
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    "linear_num_heads": 2,
    **dict.fromkeys(("num_experts_per_tok", "mamba_expand"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "rotary_dim": 4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "is_decoder": True,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0,
}  # fmt: skip
_IMAGE_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "out_hidden_size", "projection_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("image_size",), 28),
    "patch_size": 14, "head_dim": 16, "vocab_size": 32,
}  # fmt: skip
_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Lists of a configuration with what each layer is."""
_MROPE = ("paddleocr_vl_text",)
"""Families that split rotations into sections and whose configuration does not say so."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_chunk_size": 16}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "layer_types": ["full_attention"] * _LAYERS,
    },
    "dots1": {"moe_intermediate_size": _WIDTH, "n_shared_experts": 1, "n_routed_experts": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": _WIDTH,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16, "state_size": 8},
    "dbrx": {
        "n_heads": _HEADS, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": _WIDTH, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": _WIDTH},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [_WIDTH, _WIDTH],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0, "qk_nope_head_dim": 8},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 256,
            "original_max_position_embeddings": 256, "partial_rotary_factor": 1.0,
        },
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16, "ssm_state_size": 8},
    "reformer": {
        "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16), "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_dt_rank": 4,
        "num_key_value_heads": _HEADS, "attention_hidden_size": 2 * _WIDTH, "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8,
        "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 5,
        "num_key_value_heads": _HEADS, "chunk_size": 16, "hybrid_layer_ids": [1], "head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},

}  # fmt: skip
"""What the configurations of some families need beside sizes, and layers of every kind where the default has one."""


def build(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of this family with random weights.

    Raises whatever a class asks of its configuration, and ValueError where the smallest one has too many weights.
    """
    made = transformers.AutoModelForImageTextToText if family in WITH_IMAGES else transformers.AutoModelForCausalLM
    config = _small_config(family, changes)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in made.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size} weights")
    return randomize(made.from_config(config, dtype=torch.float32))


def _small_config(family: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    made = transformers.CONFIG_MAPPING[family]
    default = made()
    text = default.get_text_config(decoder=True)
    sizes = _text_sizes(text, _OWN.get(text.model_type, {}) | changes)
    if text not in vars(default).values():
        # The configuration itself, or a view of an encoder-decoder's as a decoder.
        return made(**_text_sizes(default, _OWN.get(family, {}) | changes))
    parts = {}
    for name, part in vars(default).items():
        if part is text:
            parts[name] = type(text)(**sizes)
        elif isinstance(part, transformers.PreTrainedConfig):
            known = {*part.to_dict(), *part.attribute_map}
            parts[name] = type(part)(**{key: value for key, value in _IMAGE_SIZES.items() if key in known})
    return made(**parts, **_special(default))


def _text_sizes(text: transformers.PreTrainedConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a small model, with layers of every kind that the default has."""
    described = text.to_dict()
    known = {*described, *text.attribute_map}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = _HEADS
    if "attention_types" in known:
        sizes["attention_types"] = [[["global", "local"], 1]]
    kinds = {name: list(dict.fromkeys(described[name])) for name in _LISTS if isinstance(described.get(name), list)}
    kinds = {name: found for name, found in kinds.items() if len(found) > 1 and name not in own}
    if kinds and "num_hidden_layers" not in own:
        layers = 4
        sizes["num_hidden_layers"] = layers
        sizes |= {name: [found[at % len(found)] for at in range(layers)] for name, found in kinds.items()}
    if "mrope_section" in getattr(text, "ignore_keys_at_rope_validation", ()) or text.model_type in _MROPE:
        rope = described.get("rope_parameters") or {}
        share = rope.get("partial_rotary_factor") or described.get("partial_rotary_factor") or 1
        half = int((own.get("head_dim") or sizes.get("head_dim") or _WIDTH // _HEADS) * share) // 2
        sections = [half - 2 * (half // 4), half // 4, half // 4]
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **rope, "mrope_section": sections}
    return sizes | _special(text) | own


def _special(config: transformers.PreTrainedConfig) -> dict[str, int]:
    """Ids of what stands for images and the like, within the vocabulary."""
    ends = ("_token_id", "_token_index")
    given = config.to_dict()
    names = sorted(
        name for name in given if name.endswith(ends) and isinstance(given[name], int) and name not in _SIZES
    )
    return {name: VOCAB - 1 - at for at, name in enumerate(names)}
