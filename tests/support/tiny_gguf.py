"""GGUF files made from the tiny models, as converters make them, and the weights that are left after quantizing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from decodery.models.loaders.gguf_blocks import READ
from decodery.models.native.super_blocks import BlockKind, block_layer
from decodery.models.tokenizers.token_bytes import byte_alphabet
from tiny_models import SPECIAL, VOCAB

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


_STATES = {"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight", "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
}  # fmt: skip


def write_states(path: Path, model: transformers.PreTrainedModel, kind: Kind) -> None:
    """Write a model with Mamba-2 layers, its matrices quantized to `kind`, and give `model` the weights that leaves."""
    config, pure = model.config, model.config.model_type == "mamba2"
    writer = gguf.GGUFWriter(path, "mamba2" if pure else "falcon-h1")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(1 << 20 if pure else config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0 if pure else config.intermediate_size)
    writer.add_head_count(0 if pure else config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon if pure else config.rms_norm_eps)
    if pure:
        heads, inner, groups = config.num_heads, config.num_heads * config.head_dim, config.n_groups
        kernel, state = config.conv_kernel, config.state_size
    else:
        heads, inner, groups = config.mamba_n_heads, config.mamba_d_ssm, config.mamba_n_groups
        kernel, state = config.mamba_d_conv, config.mamba_d_state
        writer.add_vocab_size(config.vocab_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.hidden_size // config.num_attention_heads)
        writer.add_value_length(config.hidden_size // config.num_attention_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)
    _add_tokenizer(writer, {})
    left = {}
    for name, weight in model.state_dict().items():
        new, part = _state_name(name)
        factor = np.float32(1.0) if pure else _multiplied(name, config, inner, groups * state)
        stored, packed_as = weight.float().numpy() * factor, None
        if part in ("A_log", "D"):
            stored = (-np.exp(stored) if part == "A_log" else stored)[:, None]
        elif part == "norm.weight":
            stored = stored.reshape(groups, -1)
        elif part == "conv1d.weight":
            stored = stored[:, 0]
        elif name.endswith("proj.weight"):
            packed_as = kind
        if packed_as is not None:
            packed = quantize(stored, packed_as)
            left[name] = torch.from_numpy(np.ascontiguousarray(dequantize(packed, packed_as)) / factor)
            writer.add_tensor(new, packed, raw_dtype=packed_as)
        else:
            writer.add_tensor(new, np.ascontiguousarray(stored, dtype=np.float32))
    model.load_state_dict(left, strict=False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _state_name(name: str) -> tuple[str, str]:
    """What a file calls a tensor, and which part of a mixer it is, if any."""
    whole = {
        "backbone.embeddings": "token_embd",
        "backbone.norm_f": "output_norm",
        "model.final_layernorm": "output_norm",
    }
    if ".layers." not in name:
        path, ending = name.rsplit(".", 1)
        return f"{(whole | _NAMES)[path]}.{ending}", ""
    _, _, layer, inner = name.split(".", 3)
    mixer, _, part = inner.partition(".")
    if mixer in ("mixer", "mamba"):
        return f"blk.{layer}.{_STATES[part]}", part
    if inner == "pre_ff_layernorm.weight":
        return f"blk.{layer}.ffn_norm", ""
    own = {"norm": "attn_norm"} | _NAMES
    return f"blk.{layer}.{own[inner.removesuffix('.weight').replace('feed_forward.', 'mlp.')]}.weight", ""


def _multiplied(name: str, config: Any, inner: int, led: int) -> np.ndarray:
    """What a converter multiplies a tensor of Falcon-H1 by."""
    mixed = np.repeat(config.ssm_multipliers, (inner, inner, led, led, config.mamba_n_heads)) * config.ssm_in_multiplier
    gate, down = config.mlp_multipliers
    enters = config.attention_in_multiplier
    by_part: dict[str, Any] = {
        "q_proj": enters, "k_proj": enters * config.key_multiplier, "v_proj": enters,
        "o_proj": config.attention_out_multiplier, "in_proj": mixed[:, None], "out_proj": config.ssm_out_multiplier,
        "gate_proj": gate, "down_proj": down, "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
    }  # fmt: skip
    return np.asarray(by_part.get(name.split(".")[-2], 1.0), dtype=np.float32)


def byte_vocabulary() -> list[str]:
    tokens = [character for character, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
    tokens += [*SPECIAL, "th"]
    return tokens + [f"[PAD{n}]" for n in range(VOCAB - len(tokens))]


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: Kind,
    *,
    others: dict[str, Kind] | None = None,
    metadata: dict[str, Any] | None = None,
    split: int = 0,
) -> None:
    """Write `model` with its matrices quantized to `kind`, and give `model` the weights that this leaves.

    others: by a part of their names, the matrices that are quantized otherwise. split: tensors of a part, 0: one file.
    """
    config, usual = model.config, kind
    family = config.model_type
    architecture = _ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    ropes = config.rope_parameters
    rope = ropes["full_attention"] if family == "gemma3_text" else ropes
    writer.add_rope_freq_base(rope["rope_theta"])
    if family == "gemma3_text" or (family == "mistral" and config.sliding_window):
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    _add_tokenizer(writer, metadata or {})
    left = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = weight.float().numpy()
        gemma_norm = family == "gemma3_text" and name.endswith("norm.weight")
        stored = stored + 1.0 if gemma_norm else stored
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads, half = len(stored) // head_dim, head_dim // 2
            stored = stored.reshape(heads, 2, half, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
        kind = next((other for part, other in (others or {}).items() if part in name), usual)
        packed = quantize(stored, kind) if stored.ndim == 2 else stored.astype(np.float32)
        writer.add_tensor(_gguf_name(name, family), packed, raw_dtype=kind if stored.ndim == 2 else None)
        if stored.ndim == 2:
            exact = dequantize(packed, kind)
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                exact = exact.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(exact.shape)
            left[name] = torch.from_numpy(np.ascontiguousarray(exact))
    model.load_state_dict(left, strict=False)
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str, family: str) -> str:
    path, kind = name.rsplit(".", 1)
    names = _NAMES | (_GEMMA_NAMES if family == "gemma3_text" else {})
    if path in names:
        return f"{names[path]}.{kind}"
    _, _, layer, inner = path.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{kind}"


def _add_tokenizer(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    tokens = byte_vocabulary()
    control = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(control)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_add_bos_token(metadata.get("add_bos", False))
    writer.add_chat_template(TEMPLATE)


def random_blocks(kind: Kind, rows: int, blocks: int) -> np.ndarray:
    """[rows, bytes] of blocks of a type whose bits are drawn, but for their scales."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        exponents = raw.reshape(rows, blocks, size)[..., 0]
        exponents[...] = random.integers(118, 134, exponents.shape)
        # The least ones are no normal numbers.
        exponents[0, :2] = 0, 1
        return raw
    each, at = raw.reshape(rows, blocks, size), -2 if kind == Kind.Q6_K else 0
    scales = 2 if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    drawn = random.uniform(-2, 2, (rows, blocks, scales)).astype(np.float16).view(np.uint8)
    each[..., at : at + 2 * scales or None] = drawn
    return raw


def as_linear(kind: str, raw: np.ndarray) -> BlockKind:
    form, read = READ[kind]
    return block_layer(form, *map(torch.from_numpy, read(raw)))
