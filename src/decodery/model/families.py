"""From the config.json of a Hugging Face checkpoint to `ModelConfig`, and the names its tensors have there."""

from __future__ import annotations

import math
from typing import Any

from ..errors import CorruptFile, UnsupportedModel
from .config import ModelConfig, Rope

MOST_LAYERS = 4096
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")

# What these fields switch on is not in the forward pass; zero, false or null is how configs say "off".
_UNSUPPORTED = (
    "quantization_config",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
    "num_experts",
    "num_local_experts",
    "is_encoder_decoder",
    "add_cross_attention",
    "no_rope_layers",
)
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


class Fields:
    """Typed access to the fields of a JSON object that may hold anything."""

    def __init__(self, raw: Any, origin: str) -> None:
        if not isinstance(raw, dict):
            raise CorruptFile(f"{origin} should hold an object of named values, not {type(raw).__name__}")
        self.raw, self.origin = raw, origin

    def value(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where it is missing; missing without a default is an error."""
        if name not in self.raw and default is None:
            raise CorruptFile(f"{self.origin} has no field {name}: the file is incomplete")
        return self.raw.get(name, default)

    def count(self, name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to `most`."""
        value = self.value(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise CorruptFile(f"{self.origin}: {name} should be a whole number from 1 to {most}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.value(name, default)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise CorruptFile(f"{self.origin}: {name} should be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.raw.get(name, default))

    def unsupported(self, name: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.origin}: {name} = {self.raw.get(name)!r} is not supported")


def read_config(raw: Any, origin: str = "config.json") -> ModelConfig:
    """The configuration of a model in one of `FAMILIES`; whatever could not be run faithfully is refused by name."""
    fields = Fields(raw, origin)
    family = fields.value("model_type", "")
    if family not in FAMILIES:
        raise UnsupportedModel(f"{origin}: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise fields.unsupported(name)
    if any(not str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in raw.get("architectures") or ()):
        raise fields.unsupported("architectures")
    gemma = family == "gemma3_text"
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    # Llama's first configurations had as many key-value heads as query heads and did not say so.
    kv_heads = fields.count("num_key_value_heads", heads if family == "llama" else None)
    head_dim = fields.count("head_dim", {"qwen3": 128, "gemma3_text": 256}.get(family, hidden // heads or None))
    if heads % kv_heads or head_dim % 2:
        raise CorruptFile(f"{origin}: {heads} heads of {head_dim} do not fit {kv_heads} key-value heads")
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    window, sliding = _sliding(fields, family, layers)
    rope, local_rope = _gemma_ropes(fields) if gemma else (_rope(_rope_fields(fields), fields), None)
    bias = fields.flag("attention_bias", False)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5 if gemma else head_dim**-0.5
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=fields.count("max_position_embeddings", 131_072 if gemma else 2048),
        family=family,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        sliding_window=window,
        sliding_layers=sliding,
        tie_embeddings=fields.flag("tie_word_embeddings", gemma),
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        output_bias=bias and family in ("llama", "qwen3", "gemma3_text"),
        mlp_bias=fields.flag("mlp_bias", False) and family == "llama",
        qk_norm=family in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma,
        activation=_activation(fields, "hidden_activation" if gemma else "hidden_act"),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=scale,
        bos_id=token_ids(raw.get("bos_token_id"))[0] if token_ids(raw.get("bos_token_id")) else None,
        eos_ids=token_ids(raw.get("eos_token_id")),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, several or none, as configurations write them."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _activation(fields: Fields, name: str) -> str:
    default = "gelu_pytorch_tanh" if name == "hidden_activation" else "silu"
    activation = _ACTIVATIONS.get(str(fields.raw.get(name) or default))
    if activation is None:
        raise fields.unsupported(name)
    return activation


def _sliding(fields: Fields, family: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, None where no layer has one, and which layers see only that far."""
    raw = fields.raw
    if family == "llama" or (family in ("qwen2", "qwen3") and not raw.get("use_sliding_window")):
        window = None
    else:
        window = raw.get("sliding_window", 4096)
        window = None if window is None else fields.count("sliding_window", 4096)
    types = raw.get("layer_types")
    if types is not None and family != "llama":
        if not isinstance(types, list) or len(types) != layers:
            raise CorruptFile(f"{fields.origin}: layer_types should name a kind for each of the {layers} layers")
        for kind in types:
            if kind not in _LAYER_TYPES or (kind == "sliding_attention" and window is None):
                raise UnsupportedModel(f"{fields.origin}: layer_types has {kind!r}, which is not supported here")
        sliding = tuple(kind == "sliding_attention" for kind in types)
    elif family == "gemma3_text":
        pattern = fields.count("sliding_window_pattern", 6)
        sliding = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    elif family == "mistral":
        sliding = (window is not None,) * layers
    else:
        first = raw.get("max_window_layers", 28)
        sliding = tuple(window is not None and layer >= first for layer in range(layers))
    if window is None or not any(sliding):
        return None, (False,) * layers
    return window, sliding


def _rope_fields(fields: Fields) -> Fields:
    """The rope parameters, which older files keep as rope_scaling beside rope_theta."""
    raw = fields.raw
    parameters = dict(Fields(raw.get("rope_scaling") or raw.get("rope_parameters") or {}, fields.origin).raw)
    if any(kind in parameters for kind in _LAYER_TYPES):
        raise UnsupportedModel(f"{fields.origin}: rope_parameters for each kind of layer are only known for Gemma 3")
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    if raw.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    return Fields(parameters, f"{fields.origin}: rope_parameters")


def _gemma_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Gemma 3's global and local rotation."""
    raw = fields.raw
    both = Fields(raw.get("rope_parameters") or {}, f"{fields.origin}: rope_parameters").raw
    if both and not any(kind in both for kind in _LAYER_TYPES):
        raise UnsupportedModel(f"{fields.origin}: rope_parameters of Gemma 3 should name each kind of layer")
    ropes = []
    for kind, theta in zip(
        _LAYER_TYPES, (raw.get("rope_theta", 1_000_000.0), raw.get("rope_local_base_freq", 10_000.0)), strict=True
    ):
        parameters = dict(both.get(kind) or {})
        if kind == "full_attention":
            parameters.update(raw.get("rope_scaling") or {})
        parameters.setdefault("rope_theta", theta)
        ropes.append(_rope(Fields(parameters, f"{fields.origin}: rope_parameters of {kind}"), fields))
    return ropes[0], ropes[1]


def _rope(parameters: Fields, fields: Fields) -> Rope:
    raw = parameters.raw
    if (raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise parameters.unsupported("partial_rotary_factor")
    theta = parameters.number("rope_theta")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=parameters.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModel(f"{parameters.origin}: rope_type {kind!r} is not supported")
    original = parameters.count("original_max_position_embeddings", fields.count("max_position_embeddings", 2048))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=parameters.number("factor"),
            original_max_positions=original,
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
        )

    def optional(name: str) -> float | None:
        return None if raw.get(name) is None else parameters.number(name)

    return Rope(
        theta=theta,
        kind=kind,
        factor=parameters.number("factor", fields.count("max_position_embeddings", 2048) / original),
        original_max_positions=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


_HEAD = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def tensor_name(part: str, config: ModelConfig) -> str:
    """What a checkpoint calls `part`, such as "layers.3.q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    path, kind = part.rsplit(".", 1)
    if path in _HEAD:
        return f"{_HEAD[path]}.{kind}"
    _, layer, name = path.split(".")
    inner = (_SANDWICH.get(name) if config.sandwich_norms else None) or _LAYER[name]
    return f"model.layers.{layer}.{inner}.{kind}"


def stores_norms_less_one(config: ModelConfig) -> bool:
    """Whether the checkpoint's norm weights are w - 1, as Gemma's are."""
    return config.family == "gemma3_text"
