"""Tiny random models of every family, saved as Hugging Face folders, and what `transformers` says of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from dataclasses import replace

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.token_bytes import byte_alphabet
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, exchanged
from decodery.testing import tiny_transformer

transformers.logging.set_verbosity_error()

VOCAB = 288
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": None,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}

_STATES = {"state_size": 8, "conv_kernel": 4, "expand": 2, "chunk_size": 16, "pad_token_id": 0}
_SELECTIVE = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 3, "pad_token_id": 0}
_JAMBA = {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 5, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_dt_rank": 4, "pad_token_id": 0,
}  # fmt: skip
_BAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_chunk_size": 16, "attn_layer_indices": [1], "pad_token_id": 0,
}  # fmt: skip
_ZAMBA2 = {
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1,
    "num_mem_blocks": 1,
    "adapter_rank": 5,
    "layers_block_type": ["mamba", "hybrid", "hybrid"],
    "num_key_value_heads": 4,
    "chunk_size": 16,
    "pad_token_id": 0,
}
_FALCON = {
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "pad_token_id": 0,
}  # fmt: skip
_GRANITE = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5,
    "pad_token_id": 0,
}  # fmt: skip
_MULTIPLIED = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
}
_NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16, "head_dim": 16,
    "pad_token_id": 0, "num_hidden_layers": None,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
}  # fmt: skip
_DEEPSEEK = {
    "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_routed_experts": 5, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "num_key_value_heads": 4,
}  # fmt: skip

_LLAMA4 = {
    "head_dim": 16, "pad_token_id": 0, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 5,
    "num_experts_per_tok": 1, "attention_chunk_size": 6, "no_rope_layer_interval": 3, "floor_scale": 4,
    "attn_scale": 0.3, "rope_parameters": _DEFAULT_ROPE,
}  # fmt: skip

_GEMMA3N = {
    "head_dim": 16, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 5, "laurel_rank": 6,
    "vocab_size_per_layer_input": VOCAB - 30, "hidden_size_per_layer_input": 12, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.9, 0.4, 0.0, 0.0, 0.0, 0.0],
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 5,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 12, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True,
}  # fmt: skip
_GEMMA4_WIDE = _GEMMA4 | {
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
# name -> (family, what differs from the smallest configuration). Windows are shorter than the sequences tested.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biases, wide heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama llama3 rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": _YARN}),
    "qwen3 yarn rope, mscale": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "mistral, every layer slides": ("mistral", {"sliding_window": 5}),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, last layers slide": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3, half turned, slides": (
        "phi3",
        {"pad_token_id": 0, "sliding_window": 5, "rope_parameters": _DEFAULT_ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "glm4": ("glm4", {"head_dim": 16, "pad_token_id": 0, "attention_bias": True}),
    "glm4, all turned": (
        "glm4", {"head_dim": 8, "pad_token_id": 0, "rope_parameters": _DEFAULT_ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "phi3, longrope": (
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 20, "partial_rotary_factor": 0.75,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                             "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
                             "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0]}},
    ),
    "glm": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0},
    ),
    "gemma2, one cap": (
        "gemma2", {"head_dim": 16, "attn_logit_softcapping": None, "layer_types": ["full_attention"] * 3},
    ),
    "olmo3": (
        "olmo3",
        {"pad_token_id": 0, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "num_hidden_layers": 4,
         "rope_parameters": {"full_attention": _YARN | {"attention_factor": 1.2}, "sliding_attention": _DEFAULT_ROPE}},
    ),
    "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3, slides, biases": (
        "smollm3",
        {"pad_token_id": 0, "no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 5,
         "attention_bias": True, "mlp_bias": True},
    ),
    "ernie4_5": ("ernie4_5", {"pad_token_id": 0, "head_dim": 16, "use_bias": True}),
    "exaone4": (
        "exaone4", {"sliding_window": 5, "sliding_window_pattern": 2, "rope_parameters": _LLAMA3},
    ),
    "exaone4, no window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"head_dim": 32, "attention_bias": True,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5,
         "tie_word_embeddings": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "phi": ("phi", {}),
    "phi, yarn": ("phi", {"rope_parameters": _YARN | {"partial_rotary_factor": 0.5}}),
    "lfm2": ("lfm2", {"pad_token_id": 0, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}),
    "lfm2, wide rows": (
        "lfm2", {"pad_token_id": 0, "full_attn_idxs": [1], "num_key_value_heads": 1, "block_auto_adjust_ff_dim": False,
                 "conv_L_cache": 4, "head_dim": 8, "tie_word_embeddings": False},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"pad_token_id": 0}),
    "stablelm": ("stablelm", {"pad_token_id": 0, "use_qkv_bias": True}),
    "stablelm, side by side": (
        "stablelm",
        {"pad_token_id": 0, "use_parallel_residual": True,
         "rope_parameters": _DEFAULT_ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one after the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
         "rope_parameters": _DEFAULT_ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "gpt2": ("gpt2", {}),
    "mamba2": ("mamba2", _STATES | {"num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "bamba": ("bamba", _BAMBA),
    "bamba, many numbers": ("bamba", _BAMBA | {"num_key_value_heads": 1, "mamba_n_groups": 4, "mamba_d_state": 24}),
    "zamba2": ("zamba2", _ZAMBA2),
    "zamba2, rotated, blocks in turns": (
        "zamba2",
        _ZAMBA2 | {"num_hidden_layers": 4, "intermediate_size": 16, "num_mem_blocks": 2, "adapter_rank": 2,
                   "use_shared_attention_adapter": True, "use_mem_rope": True, "use_long_context": True,
                   "mamba_ngroups": 2, "hidden_act": "silu",
                   "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"]},
    ),
    "falcon_h1": ("falcon_h1", _FALCON),
    "falcon_h1, multiplied and normed": (
        "falcon_h1",
        _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "mamba_d_ssm": 96,
                   "num_key_value_heads": 1, "tie_word_embeddings": True, "embedding_multiplier": 1.7,
                   "lm_head_multiplier": 0.6, "key_multiplier": 0.8, "attention_in_multiplier": 1.3,
                   "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9,
                   "mlp_multipliers": [1.4, 0.5], "ssm_multipliers": [0.6, 1.1, 0.7, 1.5, 0.8]},
    ),
    "mamba": ("mamba", _SELECTIVE),
    "falcon_mamba": ("falcon_mamba", _SELECTIVE | {"state_size": 24, "mixer_rms_eps": 1e-3}),
    "jamba": ("jamba", _JAMBA),
    "jamba, dense": ("jamba", _JAMBA | {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1,
                                        "mamba_d_conv": 3, "mamba_dt_rank": 5, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, every layer slides": (
        "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "pad_token_id": 0}),
    "olmoe, normed, biases": (
        "olmoe",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True, "pad_token_id": 0},
    ),
    "granitemoe": ("granitemoe", _MULTIPLIED | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "granitemoeshared",
        _MULTIPLIED | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32,
                       "shared_intermediate_size": 48},
    ),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen3_moe, normed": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe, every layer slides": ("qwen3_moe", _EXPERTS | {"use_sliding_window": True, "sliding_window": 5}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64},
    ),
    "qwen2_moe, the first layer slides": (
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "use_sliding_window": True,
         "shared_expert_intermediate_size": 64, "sliding_window": 5, "max_window_layers": 2},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        _GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "granitemoehybrid, dense, rotated": (
        "granitemoehybrid",
        _GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope", "num_key_value_heads": 1,
                    "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp",
                                                                    "linear_attention"]}),
    "nemotron_h, experts": (
        "nemotron_h",
        _NEMOTRON | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 8,
                     "num_experts_per_tok": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
                     "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"pad_token_id": 0, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    ),
    "lfm2_moe, untied, not normed": (
        "lfm2_moe",
        {"pad_token_id": 0, "layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 0, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_expert_bias": False, "norm_topk_prob": False,
         "routed_scaling_factor": 1.5, "tie_word_embeddings": False, "conv_L_cache": 4},
    ),
    "qwen3_next": ("qwen3_next", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_next, biases, yarn": (
        "qwen3_next",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False, "attention_bias": True,
                             "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                             "linear_num_key_heads": 4, "linear_key_head_dim": 17, "linear_value_head_dim": 33,
                             "rope_parameters": _YARN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA | {"head_dim": 16}),
    "qwen3_5, tied": (
        "qwen3_5_text",
        _DELTA | {"head_dim": 32, "tie_word_embeddings": True, "linear_value_head_dim": 16, "num_key_value_heads": 1,
                  "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "glm4_moe": (
        "glm4_moe",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0},
    ),
    "glm4_moe, in groups": (
        "glm4_moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
         "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": 16, "sliding_window": 5,
         "rope_parameters": _YARN | {"truncate": False}},
    ),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK),
    "deepseek_v3": (
        "deepseek_v3",
        _DEEPSEEK | {"q_lora_rank": 20, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
                     "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v2, queries in two steps, yarn": (
        "deepseek_v2",
        _DEEPSEEK | {"q_lora_rank": 20, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
                     "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v2, in groups": (
        "deepseek_v2",
        _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                     "routed_scaling_factor": 1.5},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        _DEEPSEEK | {"q_lora_rank": 20, "n_routed_experts": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "glm4_moe_lite, in groups, other pairs": (
        "glm4_moe_lite",
        _DEEPSEEK | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_interleave": False,
                     "norm_topk_prob": False, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "ministral3": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": _YARN | {"original_max_position_embeddings": 5, "mscale": 1.0,
                                                     "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}},
    ),
    "ministral3, slides": (
        "ministral3", {"head_dim": 32, "sliding_window": 5, "tie_word_embeddings": True,
                       "rope_parameters": _DEFAULT_ROPE | {"llama_4_scaling_beta": 0.3,
                                                           "original_max_position_embeddings": 7}},
    ),
    "llama4_text": ("llama4_text", _LLAMA4 | {"rope_parameters": _LLAMA3}),
    "llama4_text, dense layers between": (
        "llama4_text",
        _LLAMA4 | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2,
                   "use_qk_norm": False, "attention_bias": True, "no_rope_layers": [1, 0, 1, 0],
                   "attn_temperature_tuning": False},
    ),
    "gemma3n": ("gemma3n_text", _GEMMA3N),
    "gemma3n, other streams": (
        "gemma3n_text",
        _GEMMA3N | {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False,
                    "num_kv_shared_layers": 0, "intermediate_size": [96, 64, 96, 32, 64, 96],
                    "final_logit_softcapping": 2.0, "num_key_value_heads": 1},
    ),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4, values of keys": ("gemma4_text", _GEMMA4_WIDE),
    "gemma4, experts": (
        "gemma4_text",
        _GEMMA4_WIDE | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32,
                        "use_bidirectional_attention": "vision", "num_global_key_value_heads": 2,
                        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": 5, "pad_token_id": 0, "num_kv_shared_layers": 1,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": True},
    ),
    "gemma3_text": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24,
         "rope_parameters": _GEMMA_ROPES},
    ),
}  # fmt: skip


def make_model(case: str, seed: int = 0, **others: Any) -> transformers.PreTrainedModel:
    """The tiny model of a case, all of its weights random, norms and biases too. others: what else differs."""
    family, changes = CASES[case]
    config = transformers.AutoConfig.for_model(family, **(SHAPE | changes | others))
    return randomize(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


def randomize(model: transformers.PreTrainedModel, seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.copy_(0.15 * torch.randn_like(weight))
        for name, weight in model.named_buffers():
            if name.endswith("layer_scalar"):
                weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, and the special ones."""
    backend = tokenizers.Tokenizer(models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def whole_tokenizer() -> tokenizers.Tokenizer:
    """The same with a token for each id of the models: what texts are drawn from is then the models' own logits."""
    backend = make_tokenizer()
    backend.add_special_tokens([f"<unused{id}>" for id in range(backend.get_vocab_size(), VOCAB)])
    return backend


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a model and the tokenizer of these tests as a Hugging Face folder."""
    model.save_pretrained(folder, **options)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def in_float32(folder: Path) -> transformers.PreTrainedModel:
    """A folder as `transformers` reads it in float32; a model that is cast there has rounded angles."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def random_ids(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n)


def reference(model: transformers.PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """Logits [n, vocab] of one plain call of transformers."""
    with torch.inference_mode():
        return model(torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], use_cache=False).logits[0].float()


TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 0, 6]


def tree_mask(parents: list[int]) -> np.ndarray:
    """[n, n] bool: which ancestors each node sees, itself included."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def assert_same_logits(ours: LanguageModel, theirs: transformers.PreTrainedModel, tolerance: float = 1e-4) -> None:
    """Single tokens, chunks and a tree give the logits that transformers gives for the same sequences."""
    ids = random_ids(23)
    expected = reference(theirs, ids)
    cache = ours.new_cache()
    rows = []
    for size in (9, 1, 1, 7, 1, 4):
        chunk = ids[cache.next_position : cache.next_position + size]
        rows.append(ours.forward(Batch([Segment.chunk(chunk, cache)])).logits)
        cache.keep(range(size))
    assert (torch.cat(rows) - expected).abs().max() < tolerance

    parents = TREE_PARENTS
    mask, nodes = tree_mask(parents), random_ids(len(parents), seed=2)
    depths = mask.sum(axis=1) - 1
    segment = Segment(len(ids) + depths, tokens=nodes, mask=mask, cache=cache, logit_rows=[8, 1, 2, 5])
    scores = ours.forward(Batch([segment]))
    for node, logits in zip([8, 1, 2, 5], scores.logits, strict=True):
        path = np.concatenate([ids, nodes[mask[node]]])
        assert (logits - reference(theirs, path)[-1]).abs().max() < tolerance, node

    # After the path is kept, the next token sees it and nothing of the other branches.
    cache.keep([0, 1, 3, 6])
    path = np.concatenate([ids, nodes[[0, 1, 3, 6]], [17]])
    following = ours.forward(Batch([Segment.chunk([17], cache)])).logits
    assert (following[0] - reference(theirs, path)[-1]).abs().max() < tolerance


def doubled(model: Transformer) -> Transformer:
    """The model in float64."""

    def wide(part: Any) -> Any:
        if isinstance(part, Dense):
            return Dense(part.weight.double(), None if part.bias is None else part.bias.double())
        return part.double() if isinstance(part, torch.Tensor) else part

    whole = {name: wide(value) for name, value in vars(model.weights).items()}
    return Transformer(model.config, replace(model.weights, **whole | exchanged(model.weights, wide)))


def without_tokenizer(model: LanguageModel) -> Transformer:
    """The model as transformers knows it, which draws the padding of a vocabulary like any token."""
    assert isinstance(model, Transformer)
    return Transformer(replace(model.config, vocabulary=""), model.weights)


def tiny_loaded() -> LoadedModel:
    """A tiny model with a tokenizer that knows itself to be its own."""
    tokenizer = Tokenizer(whole_tokenizer(), bos_id=256, eos_ids=(257,))
    model = tiny_transformer(3, vocab_size=VOCAB, dtype=torch.float32)
    config = replace(model.config, eos_ids=(257,), bos_id=256, vocabulary=tokenizer.fingerprint())
    return LoadedModel(Transformer(config, model.weights), tokenizer, None, "tiny", "float32")
