"""GGUF files of tiny models in the layout of llama.cpp's converter, whose names of tensors the `gguf` package knows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from decodery.models.config import Rope
from decodery.models.torch.rope import rope_frequencies
from tiny_gguf import _add_tokenizer

ARCHITECTURES = {
    "gemma": "gemma", "gemma2": "gemma2", "phi3": "phi3", "phi": "phi2", "olmo2": "olmo2", "olmo3": "olmo2",
    "smollm3": "smollm3", "granite": "granite", "exaone4": "exaone4", "ernie4_5": "ernie4_5", "glm4": "glm4",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "mixtral": "llama",
    "lfm2": "lfm2", "mistral": "mistral3", "ministral3": "mistral3", "llama4_text": "llama4",
    "starcoder2": "starcoder2", "hunyuan_v1_dense": "hunyuan-dense",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "olmoe": "olmoe", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe",
    "gemma3n_text": "gemma3n", "gemma4_text": "gemma4",
    "seed_oss": "seed_oss", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
HYBRIDS = {"granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h", "lfm2_moe": "lfm2moe"}
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_MIXED = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "llama4_text",
    *("olmoe", "granitemoe", "granitemoeshared"),
    *LATENTS,
)
PERMUTED = ("smollm3", "granite", "granitemoe", "granitemoeshared", "mixtral", "mistral", "ministral3")
"""Whose rows of queries and keys the converter puts into pairs, as Llama's."""


def write_dense(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: Kind = Kind.F32,
    *,
    experts: Kind | None = None,
    further: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> None:
    """Write `model` with its matrices quantized to `kind`, and give it the weights that this leaves.

    experts: what those of experts are quantized to, if it is another kind.
    further: tensors beside the model's.
    metadata: keys after the architecture's name that are written beside, by what follows the last dot but for "__".
    """
    config, family = model.config, model.config.model_type
    if family in HYBRIDS:
        return write_hybrid(path, model)
    named = ARCHITECTURES[family]
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == named)
    writer = gguf.GGUFWriter(path, named)
    # Heads of Gemma 4 have two widths.
    dim = 0 if family == "gemma4_text" else getattr(config, "head_dim", None)
    dim = config.hidden_size // config.num_attention_heads if dim is None else dim
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = getattr(config, "intermediate_size", None)
    inner = model.model.layers[0].feed_forward.w1.out_features if family == "lfm2" else inner
    if inner is not None and not getattr(config, "use_double_wide_mlp", False):
        writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", inner))
    writer.add_head_count(config.num_attention_heads)
    if family == "gemma4_text":
        pass
    elif family == "lfm2":
        writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(1 if family in LATENTS else config.num_key_value_heads)
    if family in LATENTS:
        _add_latents(writer, config)
    elif dim * config.num_attention_heads != config.hidden_size and family != "gemma4_text":
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    eps = getattr(config, "layer_norm_eps", getattr(config, "norm_epsilon", None))
    if eps is None:
        writer.add_layer_norm_rms_eps(config.norm_eps if family == "lfm2" else config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(eps)
    _add_rope(writer, config, family, dim)
    _add_windows(writer, config, family)
    if family in GATED:
        _add_delta(writer, config)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family in _MIXED:
        _add_experts(writer, config)
    if family in ("gemma3n_text", "gemma4_text"):
        _add_gemma(writer, config)
    if family == "ministral3":
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    if family.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key, value in metadata.items():
        writer.add_key_value(f"{named}.{key.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    _add_tokenizer(writer, {})
    _add_tensors(writer, model, gguf.get_tensor_name_map(arch, config.num_hidden_layers), kind, dim, experts)
    for name, tensor in (further or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(
    writer: Any, model: transformers.PreTrainedModel, names: Any, kind: Kind, dim: int, experts: Kind | None
) -> None:
    family, left = model.config.model_type, {}
    gemma = family in ("gemma3n_text", "gemma4_text")
    for name, weight in (_gemma_tensors(model.state_dict()) if gemma else _together(model)).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored, permuted = weight.float().numpy(), family in PERMUTED and (".q_proj." in name or ".k_proj." in name)
        gated_norm = family in GATED and not name.endswith("linear_attn.norm.weight")
        if (family in ("gemma", "gemma2") or gated_norm) and name.endswith("norm.weight"):
            stored = stored + 1.0
        if ".linear_attn." in name:
            stored = stored[:, 0] if stored.ndim == 3 else stored
            name, stored = _delta_part(name, stored, model.config)
        if permuted:
            heads = stored.reshape(len(stored) // dim, 2, dim // 2, *stored.shape[1:])
            stored = heads.swapaxes(1, 2).reshape(stored.shape)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
            new = f"blk.{name.split('.')[2]}.{part}.scale"
        assert new is not None, name
        # Routers stay as they are, and some of Gemma 3n and 4.
        apart = gemma and any(part in new for part in ("altup", "laurel", "per_layer_model_proj"))
        if apart or stored.ndim < 2 or "ffn_gate_inp" in new or "conv1d" in name or stored.shape[1:2] == (1,):
            stored = stored[:, 0] if stored.ndim == 3 and not apart else stored
            writer.add_tensor(new, np.ascontiguousarray(stored, dtype=np.float32))
            continue
        own = experts if experts is not None and "_exps." in new and "weight" in new else kind
        packed = quantize(np.ascontiguousarray(stored), own)
        writer.add_tensor(new, packed, raw_dtype=own)
        exact = dequantize(packed, own)
        if ".linear_attn." in name:
            _delta_left(left, name, exact, model.config)
            continue
        if permuted:
            exact = exact.reshape(len(exact) // dim, dim // 2, 2, -1).swapaxes(1, 2).reshape(exact.shape)
        left[name] = torch.from_numpy(np.ascontiguousarray(exact))
    for name in [each for each in left if each.endswith(".experts.gate_proj.weight")]:
        stem = name.removesuffix(".gate_proj.weight")
        gate, up, down = (left.pop(f"{stem}.{part}_proj.weight") for part in ("gate", "up", "down"))
        if family == "llama4_text":
            both = torch.cat((gate, up), dim=1)
            left |= {f"{stem}.gate_up_proj": both.transpose(1, 2), f"{stem}.down_proj": down.transpose(1, 2)}
        elif family == "gpt_oss":
            both = torch.stack((gate, up), dim=2).flatten(1, 2)
            left |= {f"{stem}.gate_up_proj": both.transpose(1, 2), f"{stem}.down_proj": down.transpose(1, 2)}
        else:
            left |= {f"{stem}.gate_up_proj": torch.cat((gate, up), dim=1), f"{stem}.down_proj": down}
    model.load_state_dict(left, strict=False)
    model.tie_weights()


def _add_gemma(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.model_type == "gemma3n_text":
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        spread = torch.distributions.normal.Normal(0, 1)
        shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
        writer.add_activation_sparsity_scale(spread.icdf(shares).tolist())
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        return
    own = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    widths = [each.head_dim for each in own]
    for add, width in (("", max(widths)), ("_swa", min(widths))):
        for part in ("key_length", "value_length"):
            getattr(writer, f"add_{part}{add}")(width)
        getattr(writer, f"add_rope_dimension_count{add}")(width)
    writer.add_head_count_kv([each.num_key_value_heads for each in own])
    inner, wide = config.intermediate_size, config.use_double_wide_mlp * config.num_kv_shared_layers
    if wide:
        writer.add_feed_forward_length([inner] * (config.num_hidden_layers - wide) + [2 * inner] * wide)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    turned = int(max(widths) * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    still = np.full(max(widths) // 2 - turned, 1e30, dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", np.concatenate([np.ones(turned, dtype=np.float32), still]))


def _gemma_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the converter makes of the tensors of Gemma 3n and 4: streams in one, scales as weights."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if ".altup_" in name or name.startswith("model.altup_"):
            stem = ".".join(name.split(".")[:2])
            found[f"{stem}.weight"] = torch.cat((found.get(f"{stem}.weight", weight[None][:0]), weight[None]))
        else:
            plain = name.endswith((".weight", "router.scale", "per_expert_scale"))
            found[name if plain else f"{name}.weight"] = weight
    return found


def _add_delta(writer: Any, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_key_value(f"{ARCHITECTURES[config.model_type]}.attention.recurrent_layers", recurrent,
                         gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL)  # fmt: skip


def _delta_order(name: str, config: Any) -> tuple[int, np.ndarray] | None:
    """The axis and the order in which the converter writes a tensor of a Gated DeltaNet layer; None for its own."""
    heads, groups, dim = config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim
    keys = 2 * groups * config.linear_key_head_dim
    turns = np.arange(heads).reshape(groups, -1).T.ravel()
    values = (dim * turns[:, None] + np.arange(dim)).ravel()
    if config.model_type == "qwen3_next":
        return None
    if "in_proj_qkv." in name or "conv1d" in name:
        return 0, np.concatenate([np.arange(keys), keys + values])
    if "out_proj" in name:
        return 1, values
    return None if name.endswith(".norm.weight") else (0, values if "in_proj_z" in name else turns)


def _delta_part(name: str, stored: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """What the converter calls a tensor of a Gated DeltaNet layer, and what it makes of it."""
    if (order := _delta_order(name, config)) is not None:
        stored = stored.take(order[1], axis=order[0])
    if name.endswith(".A_log"):
        return name, -np.exp(stored)
    return name.replace(".dt_bias", ".dt_proj.bias"), stored


_MIXER = {
    "in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a",
    "D": "ssm_d", "norm": "ssm_norm",
}  # fmt: skip
_INNER = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"}, "mixer.o_proj": "attn_output", "norm": "attn_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "conv.conv": "shortconv.conv",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp", "block_sparse_moe.router": "ffn_gate_inp", "mixer.gate": "ffn_gate_inp",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    **{f"mixer.shared_experts.{half}_proj": f"ffn_{half}_shexp" for half in ("up", "down")},
}  # fmt: skip


def _hybrid_tensors(name: str, weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """What the converter makes of a tensor of a hybrid with Mamba-2 layers or convolutions."""
    whole = {"embed_tokens": "token_embd", "embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output",
             "embedding_norm": "token_embd_norm", "norm": "output_norm"}  # fmt: skip
    if ".layers." not in name:
        return {f"{whole[name.split('.')[-2]]}.weight": weight}
    _, _, layer, inner = name.split(".", 3)
    stem, shared = f"blk.{layer}.", "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if inner.startswith(("mamba.", "mixer.")) and inner.split(".")[1] in _MIXER:
        part = inner.split(".")[1]
        weight = weight[:, 0] if part == "conv1d" and weight.ndim == 3 else weight
        weight = -weight.exp() if part == "A_log" else weight
        if part in ("A_log", "D"):
            return {stem + _MIXER[part]: weight[:, None]}
        if part == "norm":
            weight = weight.view(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
        return {stem + _MIXER[part] + ("" if part == "dt_bias" else f".{inner.split('.')[2]}"): weight}
    if "experts." in inner and not inner.startswith("mixer.shared"):
        half = inner.split("experts.")[1].removesuffix(".weight").removesuffix("_proj")
        if half == "gate_up":
            return dict(zip((f"{stem}ffn_gate_exps.weight", f"{stem}ffn_up_exps.weight"), weight.chunk(2, dim=1),
                            strict=True))  # fmt: skip
        return {f"{stem}ffn_{half}_exps.weight": weight}
    if inner.startswith("shared_mlp.input"):
        gate, up = weight.chunk(2)
        return {f"{stem}ffn_gate{shared}.weight": gate, f"{stem}ffn_up{shared}.weight": up}
    if inner.startswith("shared_mlp.output"):
        return {f"{stem}ffn_down{shared}.weight": weight}
    if inner.endswith(("expert_bias", "e_score_correction_bias")):
        return {f"{stem}exp_probs_b.bias": weight}
    if config.model_type == "granitemoehybrid" and inner.startswith(("self_attn.q", "self_attn.k")):
        dim = config.hidden_size // config.num_attention_heads
        weight = weight.view(-1, 2, dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return {f"{stem}{_INNER[inner.removesuffix('.weight')]}.weight": weight.squeeze(1) if weight.ndim == 3 else weight}


def write_hybrid(path: Path, model: transformers.PreTrainedModel) -> None:
    """Write a hybrid with Mamba-2 layers or convolutions in float32, as llama.cpp's converter does."""
    config, family = model.config, model.config.model_type
    mixed = family == "nemotron_h" and "moe" in config.layers_block_type
    writer = gguf.GGUFWriter(path, HYBRIDS[family] + ("_moe" if mixed else ""))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = config.layers_block_type if family == "nemotron_h" else config.layer_types
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(dim)
    eps = {"nemotron_h": "layer_norm_epsilon", "lfm2_moe": "norm_eps"}.get(family, "rms_norm_eps")
    writer.add_layer_norm_rms_eps(getattr(config, eps))
    if family == "lfm2_moe":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif family == "nemotron_h":
        writer.add_feed_forward_length([config.intermediate_size * (kind in ("mlp", "moe")) for kind in kinds])
        writer.add_rope_scaling_finetuned(False)
        if mixed:
            writer.add_expert_group_count(1)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if family == "lfm2_moe" or mixed or (getattr(config, "num_local_experts", 0) and family == "granitemoehybrid"):
        writer.add_expert_count(config.num_experts if family == "lfm2_moe" else config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family != "lfm2_moe":
        granite = family == "granitemoehybrid"
        heads = config.mamba_n_heads if granite else config.mamba_num_heads
        writer.add_ssm_conv_kernel(config.mamba_d_conv if granite else config.conv_kernel)
        writer.add_ssm_state_size(config.mamba_d_state if granite else config.ssm_state_size)
        writer.add_ssm_group_count(config.mamba_n_groups if granite else config.n_groups)
        writer.add_ssm_inner_size(heads * (config.mamba_d_head if granite else config.mamba_head_dim))
        writer.add_ssm_time_step_rank(heads)
    _add_tokenizer(writer, {})
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for new, stored in _hybrid_tensors(name, weight, config).items():
            writer.add_tensor(new, np.ascontiguousarray(stored.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _next_rows(name: str, config: Any) -> np.ndarray:
    """Which rows of Qwen3-Next's in_proj_qkvz the converter puts into a tensor."""
    groups, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // groups * config.linear_value_head_dim
    whole = np.arange(groups * 2 * (key + value)).reshape(groups, -1)
    cuts = np.split(whole, np.cumsum([key, key, value]), axis=1)
    return np.concatenate([each.ravel() for each in (cuts[3:] if "in_proj_z" in name else cuts[:3])])


def _delta_left(left: dict[str, torch.Tensor], name: str, exact: np.ndarray, config: Any) -> None:
    """Keep what quantizing leaves of a matrix of a Gated DeltaNet layer, in the model's own order."""
    if config.model_type == "qwen3_next" and ("in_proj_qkv." in name or "in_proj_z." in name):
        rows, whole = _next_rows(name, config), name.replace("in_proj_qkv.", "in_proj_qkvz.")
        whole = whole.replace("in_proj_z.", "in_proj_qkvz.")
        count = len(rows) + len(_next_rows("in_proj_qkv" if "in_proj_z" in name else "in_proj_z", config))
        left.setdefault(whole, torch.zeros(count, exact.shape[1]))[rows] = torch.from_numpy(np.array(exact))
        return
    if (order := _delta_order(name, config)) is not None:
        exact = exact.take(np.argsort(order[1]), axis=order[0])
    left[name] = torch.from_numpy(np.array(exact))


def _together(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors, those of experts by what the converter makes of them: gates, values and outputs apart."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if stem.endswith("kv_b_proj"):
            plain, heads = model.config.qk_nope_head_dim, weight.unflatten(0, (model.config.num_attention_heads, -1))
            found[name.replace("kv_b", "k_b")] = heads[:, :plain].transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = heads[:, plain:]
            continue
        if name.endswith("in_proj_qkvz.weight"):
            for part in ("in_proj_qkv", "in_proj_z"):
                found[name.replace("in_proj_qkvz", part)] = weight[_next_rows(f"{part}.", model.config)]
            continue
        if stem.endswith("shared_mlp.input_linear"):
            for half, each in zip(("gate", "up"), weight.chunk(2), strict=True):
                found[name.replace("shared_mlp.input_linear", f"mlp.shared_expert.{half}_proj")] = each
            continue
        if not stem.endswith("experts"):
            # As the converter renames them.
            name = f"{name}.weight" if name.endswith("sinks") else name.replace("_correction_bias", "_correction.bias")
            name = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
            found[name] = weight
            continue
        stem = stem.replace("block_sparse_moe", "mlp")
        in_turns = model.config.model_type == "gpt_oss"
        turn = in_turns or model.config.model_type == "llama4_text"
        kind = "bias" if last.endswith("bias") else "weight"
        part = last.removesuffix("_bias")
        weight = weight.transpose(1, 2) if turn and kind == "weight" else weight
        if part == "down_proj":
            found[f"{stem}.down_proj.{kind}"] = weight
            continue
        halves = (weight[:, ::2], weight[:, 1::2]) if in_turns else weight.chunk(2, dim=1)
        for half, each in zip(("gate", "up"), halves, strict=True):
            found[f"{stem}.{half}_proj.{kind}"] = each
    return found


def _add_latents(writer: Any, config: Any) -> None:
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_q_lora_rank(config.q_lora_rank or 0)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if multiplier := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    second = config.model_type == "deepseek_v2"
    writer.add_expert_shared_count(config.n_shared_experts)
    kinds = getattr(config, "mlp_layer_types", None)
    writer.add_leading_dense_block_count(kinds.count("dense") if kinds else config.first_k_dense_replace)
    writer.add_expert_gating_func(getattr(gguf.ExpertGatingFuncType, "SOFTMAX" if second else "SIGMOID"))
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(not second and config.norm_topk_prob)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("gpt_oss", "llama4_text"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    elif hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_rope(writer: Any, config: Any, family: str, dim: int) -> None:
    parameters = dict(config.rope_parameters)
    parameters = parameters.get("full_attention", parameters)
    theta, kind = parameters["rope_theta"], parameters["rope_type"]
    turned = int(dim * (parameters.get("partial_rotary_factor") or 1.0))
    if family in ("phi3", "phi", "glm4", "glm4_moe", *GATED, *PERMUTED):
        writer.add_rope_dimension_count(turned)
    if kind == "dynamic":
        theta *= parameters["alpha"] ** (dim / (dim - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    writer.add_rope_freq_base(theta)
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        if (factor := parameters.get("attention_factor")) is not None:
            writer.add_rope_scaling_yarn_attn_factor(factor)
    if kind == "llama3":
        low, high, original = (
            parameters[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        rope = Rope(theta, "llama3", parameters["factor"], original, low, high)
        plain = rope_frequencies(Rope(theta), dim)[0]
        writer.add_tensor("rope_freqs.weight", (plain / rope_frequencies(rope, dim)[0]).numpy())
    if family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if kind == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
        for which in ("long", "short"):
            factors = np.array(parameters[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)


def _add_windows(writer: Any, config: Any, family: str) -> None:
    window = getattr(config, "sliding_window", None)
    if family == "phi3":
        writer.add_sliding_window(window or 0)
    elif window and family in ("gemma2", "olmo3", "exaone4", "starcoder2", "gpt_oss"):
        writer.add_sliding_window(window)
        if family in ("olmo3", "exaone4"):
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
