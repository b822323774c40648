"""From the metadata and tensors of a GGUF file to `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import (
    EPS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    SCALE,
    TOKEN_ID,
    TOKENS,
    WIDTH,
    ModelConfig,
    Rope,
)
from ..families.masked import MASKED
from ..families.seeing import image_tokens
from ..torch import latent
from .config_check import check_config
from .fields import Array, Either, Fields, Flag, Kind, Number, Text, Whole, shown
from .gguf_architecture import KINDS as OTHERS
from .gguf_architecture import MULTIPLIER, Architecture, refuse_other_widths
from .gguf_architectures import ARCHITECTURES, architecture_config, architecture_of
from .gguf_file import GGUFFile
from .gguf_rope import KINDS as ROPES
from .gguf_rope import read_rope
from .gguf_states import KINDS, PURE, STATES, states_config

_FAMILIES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"},
    **{"llada": "llada", "dream": "Dream"},
    **STATES,
}
_GENERAL: dict[str, Kind] = {
    "general.architecture": Text(64),
    "diffusion.shift_logits": Flag(),
    "tokenizer.ggml.mask_token_id": TOKEN_ID,
}
SIZES: dict[str, Kind] = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": EPS,
    **ROPES,
}
"""Keys of the sizes, norms and rotation of a block."""
_CONFIG: dict[str, Kind] = {
    **SIZES,
    "attention.causal": Flag(),
    "attention.scale": SCALE,
    "attention.sliding_window": Whole(0, POSITIONS.most),
    "attention.sliding_window_pattern": Either(Whole(0, LAYERS.most), Array(LAYERS.most)),
    **dict.fromkeys(("attention.temperature_scale", MULTIPLIER), Number(-1e9, 1e9)),
    **KINDS,
}
UNREAD = (
    *("vocab_size", "rope.scaling.finetuned", "pooling_type", "tensor_data_layout", "expert_used_count"),
    *("attention.layer_norm_epsilon", "decoder_start_token_id", "use_parallel_residual", "context_length"),
    # Tensors say how wide experts are.
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count"),
    # All sections are one and the same place of a text.
    "rope.dimension_sections",
)
"""Keys that say nothing of the forward pass where they are not read."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), 1.0),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func"), 1),
    **{"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0},
}
"""Values that change nothing, of keys that are not read; zero, false and empty ones do not, either."""


def read_gguf_config(file: GGUFFile, origin: str) -> ModelConfig:
    """The configuration that a file's metadata and tensors describe.

    Raises CorruptFile or UnsupportedModel.
    """
    general = Fields(file.metadata, origin, _GENERAL)
    architecture = general.get("general.architecture")
    known = (*_FAMILIES, *ARCHITECTURES)
    if architecture not in known:
        raise UnsupportedModel(
            f"{origin}: the architecture {architecture!r} is not one of {', '.join(known)}: give the "
            "safetensors folder or the Hub id that the file was made from, which may run through transformers"
        )
    prefix = f"{architecture}."
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if architecture in PURE:
        named = {key: value for key, value in named.items() if isinstance(value, bool | np.ndarray) or value != 0}
    other = architecture_of(file)
    fields = Fields(named, origin, _CONFIG if other is None else _CONFIG | OTHERS)
    if named.get(MULTIPLIER) and (other is None or not other.multiplied):
        raise fields.unsupported(MULTIPLIER)
    config = _config(architecture, other, file, fields, general)
    _refuse_unread(named, origin, prefix, fields.read, other or Architecture(config.family))
    return config


def _refuse_unread(named: Mapping[str, Any], origin: str, prefix: str, read: set[str], own: Architecture) -> None:
    """Raise UnsupportedModel for a key that was not read, by its name, unless its value changes nothing."""
    fixed = {"attention.causal": True, **own.fixed}
    for key in sorted(named.keys() - read - {*UNREAD, *own.unread}):
        value = named[key]
        plain = not isinstance(value, np.ndarray)
        if plain and (value == fixed[key] if key in fixed else not value or value == NEUTRAL.get(key)):
            continue
        raise UnsupportedModel(
            f"{origin}: the key {prefix}{key} = {shown(value)} is not known here, so the model might not run as it "
            "was trained"
        )


def _config(
    architecture: str, other: Architecture | None, file: GGUFFile, fields: Fields, general: Fields
) -> ModelConfig:
    origin = fields.origin
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptFile(f"{origin} has no token embedding: the file is incomplete")
    TOKENS.check(embedding.shape[0], f"{origin}: the number of tokens")
    if other is not None:
        found = architecture_config(other, file, fields, embedding.shape[0])
        return found if other.ropes else _with_rope(found, file, fields, other.theta)
    family = _FAMILIES[architecture]
    if architecture in STATES:
        tied, normed = "output.weight" not in file.tensors, "blk.0.ssm_norm.weight" in file.tensors
        config = states_config(fields, family, embedding.shape[0], tied, normed)
        return _turned(file, fields, config) if any(config.attending_layers) else config
    masked = family in MASKED
    if fields.get("attention.causal", not masked) == masked:
        raise fields.unsupported("attention.causal")
    gemma = family == "gemma3_text"
    layers = fields.need("block_count")
    hidden, heads = fields.need("embedding_length"), fields.need("attention.head_count")
    head_dim = fields.get("attention.key_length", max(hidden // heads, 1))
    refuse_other_widths(fields, head_dim)
    window, sliding = _sliding(fields, gemma, layers)
    # The largest Gemma 3 alone scales by the width of its heads in the residual stream.
    scale = (hidden / heads if gemma and layers == 62 else head_dim) ** -0.5
    config = ModelConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=fields.need("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        image_tokens=image_tokens({"model_type": family}),
        max_positions=fields.need("context_length"),
        family=family,
        norm_eps=fields.need("attention.layer_norm_rms_epsilon"),
        rope=read_rope(file, fields, 1_000_000.0 if gemma else 10_000.0, head_dim),
        local_rope=Rope(theta=fields.get("rope.freq_base_swa", 10_000.0)) if gemma else None,
        sliding_window=window,
        sliding_layers=sliding,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sandwich_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=fields.get("attention.scale", scale),
        causal=not masked,
        mask_id=general.get("tokenizer.ggml.mask_token_id") if masked else None,
        # What llama.cpp takes for granted where a file does not say.
        shifted=masked and general.get("diffusion.shift_logits", True),
    )
    check_config(config, origin)
    return config


def _with_rope(config: ModelConfig, file: GGUFFile, fields: Fields, theta: float) -> ModelConfig:
    """A configuration with the rotation of its file."""
    if config.latent is None and fields.get("attention.value_length", config.head_dim) != config.head_dim:
        raise fields.unsupported("attention.value_length")
    rope = read_rope(file, fields, theta, config.head_dim)
    if config.latent is not None:
        # Files have a tenth of the multiplier, which goes for both of what a config.json says.
        multiplier = None if rope.mscale_all_dim is None else 10.0 * rope.mscale_all_dim
        rope = replace(rope, mscale=multiplier, mscale_all_dim=multiplier, rotated=config.latent.turned)
        found = replace(config, rope=rope, attention_scale=latent.scale(config.latent, rope))
    elif config.family == "gpt_oss":
        # Files do not say that its band is not rounded to whole pairs, as its config.json does.
        found = replace(config, rope=replace(rope, truncate=False))
    elif config.family == "olmo3":
        # Sliding layers are turned as if nothing were stretched.
        found = replace(config, rope=rope, local_rope=Rope(theta=fields.get("rope.freq_base_swa", rope.theta)))
    elif config.rope.kind == "none":
        found = replace(config, local_rope=rope)
    else:
        found = replace(config, rope=rope)
    check_config(found, fields.origin)
    return found


def _turned(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    """A configuration of layers that keep a state, with the rotation of those that attend as well."""
    refuse_other_widths(fields, config.head_dim)
    return replace(config, rope=read_rope(file, fields, 10_000.0, config.head_dim))


def _sliding(fields: Fields, gemma: bool, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = fields.get("attention.sliding_window")
    if not window:
        return None, (False,) * layers
    pattern = fields.get("attention.sliding_window_pattern", 6 if gemma else None)
    if pattern is None:
        return window, (True,) * layers
    if isinstance(pattern, int):
        return window, tuple(pattern > 0 and (layer + 1) % pattern != 0 for layer in range(layers))
    if len(pattern) != layers:
        raise CorruptFile(f"{fields.origin}: attention.sliding_window_pattern should have {layers} values")
    return window, tuple(bool(value) for value in pattern)
