"""From the config.json of a Hugging Face checkpoint to `ModelConfig`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import (
    EPS,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    MOST_LAYERS,
    POSITIONS,
    SCALE,
    TOKEN_ID,
    TOKENS,
    WIDTH,
    ModelConfig,
)
from ..loaders.config_check import check_config
from ..loaders.config_keys import DEFAULTS, refuse_unknown
from ..loaders.fields import Anything, Either, Fields, Flag, Kind, Listed, Text, Whole
from ..loaders.quantized.formats import read_format
from ..torch import latent
from ..torch.latent import LATENTS
from ..torch.rope_config import FIELDS as ROPES
from ..torch.rope_config import LAYER_TYPES, gemma_ropes, read_rope, rope_fields, turned_dims
from . import falcon_h1, hybrids, layouts, masked, switched, zamba2
from .arranged import ARRANGED
from .hybrids import HYBRIDS, hybrid
from .layouts import LAYOUTS, restated
from .masked import ARCHITECTURES, MASKED, as_llama, as_qwen_moe, is_moe
from .seeing import SEEING, image_tokens, language_part
from .switched import SWITCHED

_MIXTURES = {"mixtral": "mistral", "qwen3_moe": "qwen3"}
"""Families that are like another one but for their MLPs, of which each layer has many."""
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
FAMILIES = tuple(
    dict.fromkeys((*_PLAIN, *ARRANGED, *LAYOUTS, *SWITCHED, *HYBRIDS, *LATENTS, *_MIXTURES, *MASKED)),
)
_NARROW = ("qwen3_moe", "llada_moe", "sdar_moe", "rnd1")
"""Mixtures that say of each of their MLPs how wide it is, and whether the weights of those taken sum to 1."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the names of architectures end that give logits of the next token."""

# What these fields switch on is not in the forward pass; zero, false or null is how configs say "off".
_UNSUPPORTED = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "add_cross_attention",
    "no_rope_layers",
)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
TOKEN_IDS = Either(TOKEN_ID, Listed(TOKEN_ID, 1 << 12))
_CONFIG: dict[str, Kind] = {
    "model_type": Text(64),
    "architectures": Listed(Text(256), 64),
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "query_pre_attn_scalar": SCALE,
    "tie_word_embeddings": Flag(),
    "attention_bias": Flag(),
    "mlp_bias": Flag(),
    "hidden_act": Text(64),
    "hidden_activation": Text(64),
    "use_sliding_window": Flag(),
    "sliding_window": POSITIONS,
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), LAYERS),
    "max_window_layers": Whole(0, 2**31 - 1),
    "layer_types": Listed(Text(64), MOST_LAYERS),
    **ROPES,
    "bos_token_id": TOKEN_IDS,
    "eos_token_id": TOKEN_IDS,
    "quantization_config": Anything(),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), EXPERTS),
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": Flag(),
    "decoder_sparse_step": LAYERS,
    "mlp_only_layers": Listed(Whole(0, MOST_LAYERS), MOST_LAYERS),
    **dict.fromkeys(_UNSUPPORTED, Anything()),
}


_RESTATED: dict[str, Iterable[str]] = {
    **dict.fromkeys(LAYOUTS, (*_CONFIG, *layouts.SWITCHES)),
    **{name: (*_CONFIG, *own.fields) for name, own in SWITCHED.items()},
    **dict.fromkeys(LATENTS, (*_CONFIG, *latent.FIELDS)),
    **dict.fromkeys(MASKED, (*_CONFIG, *masked.FIELDS)),
    "llada2_moe": (*_CONFIG, *masked.FIELDS, *SWITCHED["llada2_moe"].fields),
    "llada": (*masked.SAME, *masked.WANTED, *masked.SIZES, *masked.UNREAD),
    "llada_moe": (*_CONFIG, *masked.FIELDS, *masked.MOE, *masked.MOE_SIZES),
    # There are no heads, MLPs or positions to be described.
    "mamba2": (
        *(*hybrids.SAME, *hybrids.FIELDS, "intermediate_size", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads"),
    ),
    "bamba": (*_CONFIG, *hybrids.FIELDS),
    "zamba2": (*zamba2.SAME, *zamba2.FIELDS, "hidden_act"),
    "falcon_h1": (*_CONFIG, *falcon_h1.FIELDS, "time_step_limit"),
}
"""Names of the fields that are read of families that have some of their own."""


def refuse_unknown_fields(raw: Any, origin: str) -> None:
    """Raise UnsupportedModel for an unknown configuration field of a family in `FAMILIES`.

    Of a model with images, the part of its language model is looked at.
    """
    named = "llada_moe" if is_moe(raw) else Fields(raw, origin, {"model_type": Text(64)}).get("model_type", "")
    if named in SEEING:
        try:
            named, raw = language_part(raw, origin)
        except UnsupportedModel:
            # A language model that this package does not run has no fields that are known here.
            return
    if named in FAMILIES:
        refuse_unknown(raw, origin, {*_RESTATED.get(named, _CONFIG)})


def read_config(raw: Any, origin: str = "config.json") -> ModelConfig:
    """The configuration of a model in one of `FAMILIES`.

    Whatever could not be run faithfully is refused by name.
    """
    named = Fields(raw, origin, {"model_type": Text(64)}).get("model_type", "")
    images = image_tokens(raw)
    if named in SEEING:
        named, raw = language_part(raw, origin)
    if named not in FAMILIES:
        raise UnsupportedModel(f"{origin}: model_type {named!r} is not one of {', '.join((*FAMILIES, *SEEING))}")
    refuse_unknown_fields(raw, origin)
    own, raw = dict[str, Any](), DEFAULTS.get(named, {}) | raw
    if is_moe(raw):
        named, raw = "llada_moe", as_qwen_moe(raw, origin)
    elif named == "llada":
        raw = as_llama(raw, origin)
    elif named == "rnd1":
        raw = masked.without_false(raw)
    diffuses = named in MASKED
    family = MASKED[named].like if diffuses else _MIXTURES.get(named, named)
    if named in LATENTS:
        raw, own = latent.restated(raw, origin)
        family = "llama"
    for families, restate in ((LAYOUTS, restated), (HYBRIDS, hybrid), (SWITCHED, switched.restated)):
        if named in families:
            raw, own = restate(raw, named, origin)
            family = "llama"
    fields = Fields(raw, origin, _CONFIG | (masked.FIELDS if diffuses else {}))
    experts, inner = _experts(fields, named)
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise fields.unsupported(name)
    refuse_other_heads(raw, origin, ARCHITECTURES if diffuses else ())
    read_format(raw, origin)
    gemma = family == "gemma3_text"
    heads, hidden = fields.need("num_attention_heads"), fields.need("hidden_size")
    head_dim = fields.get("head_dim", max(hidden // heads, 1))
    layers = fields.need("num_hidden_layers")
    window, sliding = _sliding(fields, named, family, layers)
    turned = turned_dims(fields, named, head_dim)
    rope, local_rope = gemma_ropes(fields) if gemma else (read_rope(rope_fields(fields), fields, turned), None)
    bias = fields.get("attention_bias", False)
    begins = token_ids(fields.get("bos_token_id"))
    config = ModelConfig(
        vocab_size=fields.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=fields.get("max_position_embeddings", 2048),
        family=named,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        sliding_window=window,
        sliding_layers=sliding,
        tie_embeddings=fields.get("tie_word_embeddings", gemma),
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        output_bias=bias and family in ("llama", "qwen3", "gemma3_text"),
        mlp_bias=fields.get("mlp_bias", False) and family == "llama",
        qk_norm=family in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma or family == "glm4",
        activation=_activation(fields, "hidden_activation" if gemma else "hidden_act"),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=(fields.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        bos_id=begins[0] if begins else None,
        eos_ids=token_ids(fields.get("eos_token_id")),
        image_tokens=images,
        **(masked.of_config(fields, named, fields.need("vocab_size")) if diffuses else {}),
        experts=experts,
        experts_per_token=fields.need("num_experts_per_tok") if experts else 0,
        normed_experts=named not in _NARROW or fields.get("norm_topk_prob", False),
    )
    if own:
        config = replace(config, **own)
    if config.latent is not None:
        rope = replace(config.rope, rotated=config.latent.turned)
        config = replace(config, rope=rope, attention_scale=latent.scale(config.latent, rope))
    check_config(config, origin)
    return config


def refuse_other_heads(raw: Any, origin: str, others: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedModel where a config.json names an architecture that is no causal language model.

    A classifier or a reward model has another head in place of the one that gives logits.

    Args:
        raw: The content of the config.json.
        origin: What errors call the file.
        others: Endings of names that are accepted beside the usual ones.
    """
    named = Fields(raw, origin, {"architectures": Listed(Text(256), 64)}).get("architectures", [])
    if foreign := next((name for name in named if not name.endswith((*_CAUSAL, *others))), None):
        raise UnsupportedModel(
            f"{origin}: architectures = {foreign} is not a causal language model, and has no head that gives logits of "
            f"tokens: give a checkpoint whose architecture ends in {' or '.join(_CAUSAL)}"
        )


def _experts(fields: Fields, named: str) -> tuple[int, int]:
    """How many experts a layer has, 0 for an MLP that all rows take, and how wide each is."""
    names = ("num_experts", "num_local_experts")
    count = next((found for name in names if (found := fields.get(name))), 0)
    if count and named not in ("mixtral", *_NARROW):
        raise fields.unsupported(next(name for name in names if fields.get(name)))
    for name, plain in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if count and fields.get(name, plain) != plain:
            raise fields.unsupported(name)
    return count, fields.need("moe_intermediate_size" if named in _NARROW else "intermediate_size")


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, several or none, as configurations write them."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _activation(fields: Fields, name: str) -> str:
    default = "gelu_pytorch_tanh" if name == "hidden_activation" else "silu"
    activation = _ACTIVATIONS.get(fields.get(name) or default)
    if activation is None:
        raise fields.unsupported(name)
    return activation


def _sliding(fields: Fields, named: str, family: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, None where no layer has one, and which layers see only that far."""
    never = family in ("llama", "glm4") or (family in ("qwen2", "qwen3") and not fields.get("use_sliding_window"))
    # A null says that there is none.
    window = None if never else fields.get("sliding_window")
    types = fields.get("layer_types")
    if types is not None and family != "phi3":
        if len(types) != layers:
            raise CorruptFile(f"{fields.origin}: layer_types should name a kind for each of the {layers} layers")
        for kind in types:
            if kind not in LAYER_TYPES or (kind == "sliding_attention" and window is None):
                raise UnsupportedModel(f"{fields.origin}: layer_types has {kind!r}, which is not supported here")
        sliding = tuple(kind == "sliding_attention" for kind in types)
        if named in _MIXTURES and sliding != (window is not None,) * layers:
            # Their window is that of all layers.
            raise fields.unsupported("layer_types")
    elif family == "gemma3_text":
        pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
        sliding = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    elif family in ("mistral", "phi3") or named in _MIXTURES:
        sliding = (window is not None,) * layers
    else:
        first = fields.get("max_window_layers", 28)
        sliding = tuple(window is not None and layer >= first for layer in range(layers))
    if window is None or not any(sliding):
        return None, (False,) * layers
    return window, sliding
