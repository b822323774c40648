"""From the metadata and tensors of a GGUF file to `ModelConfig`."""

from __future__ import annotations

from dataclasses import replace

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import (
    EPS,
    FACTOR,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    SCALE,
    THETA,
    TOKEN_ID,
    TOKENS,
    WIDTH,
    ModelConfig,
    Rope,
)
from ..families.masked import LIKE
from .config_check import check_config
from .fields import Array, Either, Fields, Flag, Kind, Number, Text, Whole
from .gguf_file import GGUFFile
from .gguf_states import KINDS, STATES, states_config

FREQUENCIES = "rope_freqs.weight"
"""The tensor that divides the frequencies of rotation, as in Llama 3's files."""
_FAMILIES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"},
    **{"llada": "llada", "dream": "Dream"},
    **STATES,
}
# What these keys switch on is not in the forward pass; zero is how files say "off".
_UNSUPPORTED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "rope.scaling.yarn_log_multiplier",
)
_GENERAL: dict[str, Kind] = {
    "general.architecture": Text(64),
    "diffusion.shift_logits": Flag(),
    "tokenizer.ggml.mask_token_id": TOKEN_ID,
}
_CONFIG: dict[str, Kind] = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.causal": Flag(),
    "attention.scale": SCALE,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.sliding_window": Whole(0, POSITIONS.most),
    "attention.sliding_window_pattern": Either(Whole(0, LAYERS.most), Array(LAYERS.most)),
    "context_length": POSITIONS,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": THETA,
    "rope.freq_base_swa": THETA,
    "rope.scaling.type": Text(64),
    "rope.scaling.factor": FACTOR,
    "rope.scaling.attn_factor": SCALE,
    "rope.scaling.original_context_length": POSITIONS,
    "rope.scaling.yarn_beta_fast": SCALE,
    "rope.scaling.yarn_beta_slow": SCALE,
    **dict.fromkeys(_UNSUPPORTED, Number(-1e9, 1e9)),
    **KINDS,
}


def read_gguf_config(file: GGUFFile, origin: str) -> ModelConfig:
    """The configuration that a file's metadata and tensors describe.

    Raises CorruptFile or UnsupportedModel.
    """
    general = Fields(file.metadata, origin, _GENERAL)
    architecture = general.get("general.architecture")
    if architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"{origin}: the architecture {architecture!r} is not one of {', '.join(_FAMILIES)}: give the "
            "safetensors folder or the Hub id that the file was made from, which may run through transformers"
        )
    prefix = f"{architecture}."
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if architecture == "mamba2":
        # There are no heads and no MLPs, which files say by zeros.
        named = {key: value for key, value in named.items() if value != 0}
    fields = Fields(named, origin, _CONFIG)
    for key in _UNSUPPORTED:
        if fields.get(key):
            raise fields.unsupported(key)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptFile(f"{origin} has no token embedding: the file is incomplete")
    TOKENS.check(embedding.shape[0], f"{origin}: the number of tokens")
    family = _FAMILIES[architecture]
    if architecture in STATES:
        tied, normed = "output.weight" not in file.tensors, "blk.0.ssm_norm.weight" in file.tensors
        config = states_config(fields, family, embedding.shape[0], tied, normed)
        return _turned(file, fields, config) if any(config.attending_layers) else config
    masked = family in LIKE
    if fields.get("attention.causal", not masked) == masked:
        raise fields.unsupported("attention.causal")
    gemma = family == "gemma3_text"
    layers = fields.need("block_count")
    hidden, heads = fields.need("embedding_length"), fields.need("attention.head_count")
    head_dim = fields.get("attention.key_length", max(hidden // heads, 1))
    _same_width(fields, head_dim)
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
        max_positions=fields.need("context_length"),
        family=family,
        norm_eps=fields.need("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields, 1_000_000.0 if gemma else 10_000.0, head_dim),
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


def _turned(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    """A configuration of layers that keep a state, with the rotation of those that attend as well."""
    _same_width(fields, config.head_dim)
    return replace(config, rope=_rope(file, fields, 10_000.0, config.head_dim))


def _rope(file: GGUFFile, fields: Fields, theta: float, head_dim: int) -> Rope:
    theta = fields.get("rope.freq_base", theta)
    if FREQUENCIES in file.tensors:
        if file.tensors[FREQUENCIES].shape != (head_dim // 2,):
            raise CorruptFile(f"{fields.origin}: {FREQUENCIES} should hold {head_dim // 2} numbers")
        factors = file.rows(FREQUENCIES).tolist()
        for number, factor in enumerate(factors):
            FACTOR.check(factor, f"{fields.origin}: {FREQUENCIES}[{number}]")
        return Rope(theta=theta, kind="factors", factors=tuple(factors))
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return Rope(theta=theta)
    factor = fields.need("rope.scaling.factor")
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise fields.unsupported("rope.scaling.type")
    if fields.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.unsupported("rope.scaling.attn_factor")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=fields.need("rope.scaling.original_context_length"),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
    )


def _same_width(fields: Fields, head_dim: int) -> None:
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, head_dim) != head_dim:
            raise fields.unsupported(key)


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
