"""A tiny random model of every causal class of `transformers` that builds from a small configuration."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny_models import VOCAB, randomize

FAMILIES = tuple({CONFIG_MAPPING_NAMES[name]: name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.values())
"""Model types, one for each class of configurations. Names alone, because importing all the classes takes seconds."""
MOST_WEIGHTS = 3_000_000
_LAYERS, _HEADS, _WIDTH, _WINDOW = 2, 4, 32, 6

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "lru_width"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 2 * _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "mamba_n_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "local_attention"), _WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "mamba_expand"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "rotary_dim": 4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "is_decoder": True,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0,
}  # fmt: skip


def small_model(family: str, **changes: Any) -> transformers.PreTrainedModel | None:
    """A model of this family with random weights; None where no configuration that small is one."""
    try:
        config = _small_config(family, changes)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_WEIGHTS:
            return None
        return randomize(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    except Exception:
        # What a class asks of its configuration is its own affair.
        return None


def _small_config(family: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    made = transformers.CONFIG_MAPPING[family]
    default = made()
    text = default.get_text_config()
    known = {*text.to_dict(), *text.attribute_map}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = _HEADS
    if "attention_types" in known:
        sizes["attention_types"] = [[["global", "local"], 1]]
    if text is default:
        return made(**(sizes | changes))
    config = copy.deepcopy(default)
    for name, value in (sizes | changes).items():
        setattr(config.get_text_config(), name, value)
    return config
