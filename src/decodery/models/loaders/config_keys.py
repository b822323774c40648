"""Which fields of a config.json are known, and what `transformers` takes, family by family, where one is missing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from decodery.core.errors import UnsupportedModel

from .fields import shown

_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32_000,
}
_QWEN = _LLAMA | {
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "vocab_size": 151_936,
}
_WIDE = _LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8}
_QWEN_NEXT = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151_936,
}
_GEMMA4 = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _WIDE | {"max_position_embeddings": 131_072, "sliding_window": 4096},
    "mixtral": _WIDE
    | {
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": _QWEN,
    "Dream": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "Fast_dLLM_Qwen": _QWEN,
    "a2d-llama": _LLAMA,
    "a2d-qwen2": _QWEN,
    "a2d-qwen3": _QWEN | {"head_dim": 128},
    "sdar": _QWEN | {"head_dim": 128},
    "llada2_moe": _LLAMA
    | {
        "vocab_size": 30_592,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 0,
    },
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "sliding_window": 4096,
    },
    "phi3": _LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "vocab_size": 32_064,
    },
    "gemma3n_text": {
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "vocab_size": 262_400,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4
    | {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
    "gemma": {
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "vocab_size": 256_000,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "vocab_size": 256_000,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "olmo3": _LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "vocab_size": 50_304},
    "smollm3": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "ernie4_5": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "vocab_size": 103_424,
        "tie_word_embeddings": True,
    },
    "exaone4": _LLAMA
    | {
        "intermediate_size": 16_384,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "vocab_size": 102_400,
    },
    "deepseek_v3": _LLAMA
    | {
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "vocab_size": 129_280,
    },
    "glm4_moe_lite": {
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "vocab_size": 154_880,
    },
    "ministral3": _WIDE
    | {
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "vocab_size": 131_072,
    },
    "llama4_text": {
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "vocab_size": 202_048,
    },
    "hunyuan_v1_dense": _LLAMA | {"rms_norm_eps": 1e-5, "vocab_size": 290_943},
    "granite": _LLAMA,
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": {
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50_304,
    },
    "starcoder2": {
        "hidden_size": 3072,
        "intermediate_size": 12_288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "phi": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "vocab_size": 51_200,
    },
    "qwen2_moe": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "sliding_window": 4096,
        "max_position_embeddings": 32_768,
        "vocab_size": 151_936,
    },
    "glm4_moe": {
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_552,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "vocab_size": 201_088,
    },
    "lfm2": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "vocab_size": 65_536,
        "tie_word_embeddings": True,
    },
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT
    | {"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8, "vocab_size": 248_320},
    "qwen3_5_text": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "vocab_size": 248_320,
    },
    "granitemoehybrid": _LLAMA
    | {"mamba_n_heads": 128, "mamba_d_state": 256, "shared_intermediate_size": 1024, "num_local_experts": 8}
    | {"num_experts_per_tok": 2},
    "nemotron_h": {
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "vocab_size": 131_072,
    },
    "lfm2_moe": {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 65_536,
        "tie_word_embeddings": True,
    },
    "seed_oss": {
        "hidden_size": 4096,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
        "vocab_size": 155_136,
    },
    "glm4": _LLAMA
    | {
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 0.00000015625,
        "attention_bias": True,
        "vocab_size": 151_552,
    },
    "glm": _LLAMA
    | {
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 0.00000015625,
        "attention_bias": True,
        "vocab_size": 151_552,
    },
    "olmo2": _LLAMA | {"rms_norm_eps": 1e-5, "vocab_size": 50_304},
    "stablelm": {
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 50_304,
    },
    "gpt_neox": {
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "vocab_size": 50_432,
    },
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257},
    "mamba2": {
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
        "vocab_size": 32_768,
    },
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        {"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50_280, "layer_norm_epsilon": 1e-5}
        | {"tie_word_embeddings": True},
    ),
    "jamba": _WIDE | {"num_key_value_heads": 8, "max_position_embeddings": 262_144, "vocab_size": 65_536},
    "bamba": _WIDE
    | {
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "vocab_size": 128_000,
    },
    "zamba2": {
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "n_mamba_heads": 8,
        "vocab_size": 32_000,
    },
    "falcon_h1": _WIDE
    | {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_state": 256,
        "vocab_size": 128_000,
    },
    "deepseek_v2": _LLAMA
    | {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "vocab_size": 102_400,
    },
}
"""Only what is not the same for all families; a null in a file is not a missing field."""

DEFAULTS["sdar_moe"] = DEFAULTS["qwen3_moe"]
DEFAULTS["rnd1"] = DEFAULTS["qwen3_moe"] | {
    "num_hidden_layers": 48,
    "max_position_embeddings": 40_960,
    "head_dim": 128,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
}

_FIXED: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "rotary_scaling_factor": (1.0,),
    "use_conv_bias": (True,),
    "rms_norm": (True,),
    "gated_linear_unit": (True,),
    "position_embedding_type": ("rope", "rotary", "absolute"),
    "reorder_and_upcast_attn": (True, False),
    "use_qk_norm": (True, False),
    "use_rotary_pos_emb": (True,),
    "norm_type": ("rms", "hf_rms", "layer_norm"),
    "mlp_type": ("default",),
    "compression_ratio": (1.0,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "is_causal": (True,),
    "use_pos_enc": (True,),
    "normalization_function": ("rmsnorm",),
}
"""What published files say of a forward pass and is known at these values alone; false may switch something off."""
_GROUPS = {
    "what the model is called, and who wrote the file": (
        "architectures model_type auto_map tokenizer_class transformers_version torch_dtype dtype is_llama_config "
        "transformers.js_config custom_pipelines license"
    ),
    "texts: what begins and ends them is read elsewhere, too": (
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id prefix "
        "forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens max_length "
        "min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p "
        "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "num_return_sequences remove_invalid_values exponential_decay_length_penalty task_specific_params "
        "eod_token_id pad_id text_start_id text_end_id im_start_id im_end_id im_newline_id mask_init_id "
        "model_max_length tokenizer_model_max_length max_sequence_length seq_length n_ctx"
    ),
    "next-token layers, which the drafter mtp reads": ("num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers"),
    "what is returned and kept beside": (
        "use_cache cache_implementation return_dict return_dict_in_generate output_attentions output_hidden_states "
        "output_scores output_router_logits num_logits_to_keep keys_to_ignore_at_inference is_decoder"
    ),
    "heads of classifiers, which are refused by their architecture": (
        "id2label label2id num_labels problem_type finetuning_task classifier_dropout"
    ),
    "training": (
        "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout resid_dropout "
        "attention_probs_dropout_prob hidden_dropout_prob embedding_dropout residual_dropout gradient_checkpointing "
        "gradient_checkpointing_use_reentrant router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux "
        "z_loss_coefficient pretraining_tp pruned_heads tie_encoder_decoder cross_attention_hidden_size "
        "chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss neftune_noise_alpha residual_in_fp32 "
        "rescale_prenorm_residual time_step_rank time_step_min time_step_max time_step_floor fuse_cross_entropy "
        "fuse_linear_cross_entropy debug skip_checkpoint micro_forward ep_size "
        "altup_lr_multiplier init_method"
    ),
    "kernels that others run, and lengths of what they read at once": (
        "attn_implementation use_flash_attn use_flash_attention use_flash_attention_2 flash_attention flash_attn "
        "chunk_size mamba_chunk_size use_mamba_kernels use_mem_eff_path"
    ),
    "what follows from other fields, or is there for other kinds of rotation": (
        "head_dim qk_head_dim mamba_headdim mamba_d_head attention_hidden_size "
        "attention_head_dim kv_channels num_query_groups ffn_hidden_size n_group topk_group sliding_window_size "
        "cla_share_factor dense_list org_vocab_size initial_context_length experts_per_token block_dim block_norm_eps "
        "block_mlp_init_scale block_out_init_scale block_use_swiglu block_use_xavier_init conv_dim conv_dim_out "
        "conv_use_xavier_init"
    ),
}
_UNREAD = frozenset(name for names in _GROUPS.values() for name in names.split())
"""Fields that say nothing of the forward pass of any family that is run here."""
_UNREAD_PREFIXES = ("_", "unsloth_", "summary_", "generation_")


def refuse_unknown(raw: dict[str, Any], origin: str, read: Collection[str]) -> None:
    """Raise UnsupportedModel for a field that is not known, by its name.

    A field that is null, false, zero or empty switches nothing on, unless it is known at other values.

    Args:
        raw: The configuration.
        origin: What errors call the file.
        read: Names of the fields that are read.
    """
    for name in sorted(raw.keys() - set(read) - _UNREAD):
        value, known = raw[name], _FIXED.get(name)
        if value is None or name.startswith(_UNREAD_PREFIXES) or (value in known if known else not value):
            continue
        raise UnsupportedModel(
            f"{origin}: the field {name} = {shown(value)} is not known here, so the model might not run as it was "
            "trained: remove it from the file if the forward pass does not depend on it"
        )
