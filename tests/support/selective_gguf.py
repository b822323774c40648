"""GGUF files of tiny models with Mamba-1 layers, in the layout of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from tiny_gguf import _add_tokenizer


def write_selective(path: Path, model: transformers.PreTrainedModel, kind: Kind = Kind.F32) -> None:
    """Write Mamba, Falcon-Mamba or Jamba, and give the model the weights that quantizing leaves."""
    config, family = model.config, model.config.model_type
    mixed = family == "jamba"
    writer = gguf.GGUFWriter(path, "jamba" if mixed else "mamba")
    layers, hidden = config.num_hidden_layers, config.hidden_size
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    if mixed:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        attends = [layer % config.attn_layer_period == config.attn_layer_offset for layer in range(layers)]
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        inner, state, kernel, rank = (
            config.mamba_expand * hidden, config.mamba_d_state, config.mamba_d_conv, config.mamba_dt_rank,
        )  # fmt: skip
    else:
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_dt_b_c_rms(family == "falcon_mamba")
        inner, state, kernel, rank = (
            config.intermediate_size, config.state_size, config.conv_kernel, config.time_step_rank,
        )  # fmt: skip
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps if mixed else config.layer_norm_epsilon)
    _add_tokenizer(writer, {})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.JAMBA if mixed else gguf.MODEL_ARCH.MAMBA, layers)
    left = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for ours, part in _parts(name, weight).items():
            new = names.get_name(ours, try_suffixes=(".weight", ".bias"))
            assert new is not None, ours
            stored = np.ascontiguousarray(part.float().numpy())
            of_states = "ssm_" in new and not new.endswith(("in.weight", "out.weight"))
            if stored.ndim < 2 or of_states or "gate_inp" in new:
                writer.add_tensor(new, stored)
                continue
            packed = quantize(stored, kind)
            writer.add_tensor(new, packed, raw_dtype=kind)
            left[ours] = torch.from_numpy(dequantize(packed, kind))
    for name in [each for each in left if each.endswith("experts.gate_proj.weight")]:
        stem = name.removesuffix(".gate_proj.weight")
        gate, up, down = (left.pop(f"{stem}.{half}_proj.weight") for half in ("gate", "up", "down"))
        stem = stem.replace("mlp", "feed_forward")
        left |= {f"{stem}.gate_up_proj": torch.cat((gate, up), dim=1), f"{stem}.down_proj": down}
    unknown = model.load_state_dict(left, strict=False).unexpected_keys
    assert not unknown, unknown
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the converter makes of a tensor, by the names that it looks up."""
    if name.endswith(".A_log"):
        return {name: -weight.exp()}
    if name.endswith("conv1d.weight"):
        return {name: weight[:, 0]}
    stem = name.rpartition(".")[0].replace("feed_forward", "mlp")
    if name.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, dim=1)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{stem}.down_proj.weight": weight}
    return {name: weight}
