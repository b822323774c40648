"""Families whose blocks are Llama's up to names and a few switches, as one table.

Their configurations are restated in Llama's names, and what is left are fields of `ModelConfig`: soft caps and
alternating windows (Gemma 2), norms after sublayers (OLMo 3, EXAONE 4), layers without rotation (SmolLM3, EXAONE 4),
norms after rotation (Hunyuan), multipliers (Granite), MLPs without a gate (StarCoder2, Phi), queries that grow with
their position (Ministral 3).
"""

from __future__ import annotations

from decodery.core.errors import CorruptFile

from ..config import EPS, HEADS, KERNEL, LAYERS, MOST_LAYERS, POSITIONS, SCALE, WIDTH, Rope, Temperature
from ..loaders.fields import Either, Fields, Flag, Kind, Listed, Number, Text, Whole
from ..torch.rope_config import read_rope, rope_fields, ropes_by_kind
from .family import Family, Raw, forget_ropes, silu_alone, windows

_CAP = Number(0.0, 1e6)
_AFTER = {"norms_after": True, "qk_norm": True}
_UNGATED = {"centred_norms": True, "gated": False}


def _embeds(fields: Fields) -> float:
    return float(fields.need("hidden_size")) ** 0.5


def _gemma(fields: Fields, raw: Raw) -> Raw:
    if fields.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.unsupported("hidden_activation")
    if raw.get("hidden_act") in (None, "gelu"):
        # Its first files call the other form by this name.
        raw["hidden_act"] = "gelu_pytorch_tanh"
    return {"embedding_scale": _embeds(fields)}


def _gemma2(fields: Fields, raw: Raw) -> Raw:
    raw["hidden_act"] = fields.get("hidden_activation", "gelu_pytorch_tanh")
    return {
        "embedding_scale": _embeds(fields),
        "attention_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": fields.get("attn_logit_softcapping", 0.0),
        "logit_cap": fields.get("final_logit_softcapping", 0.0),
        **windows(fields, 2),
    }


def _olmo3(fields: Fields, raw: Raw) -> Raw:
    theta = fields.get("rope_theta", 500_000.0)
    whole, local = ropes_by_kind(fields, (theta, theta))
    forget_ropes(raw)
    return {**_AFTER, "rope": whole, "local_rope": local, **windows(fields, 4)}


def _smollm3(fields: Fields, raw: Raw) -> Raw:
    layers = fields.need("num_hidden_layers")
    interval = fields.get("no_rope_layer_interval", 4)
    turned = fields.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(layers)])
    if len(turned) < layers:
        raise CorruptFile(f"{fields.origin}: no_rope_layers should have a number for each of the {layers} layers")
    still = tuple(not turns for turns in turned[:layers])
    found = windows(fields) if fields.get("use_sliding_window", False) else {}
    if found and fields.get("layer_types") is None:
        # Without names of their kinds, layers that are not turned slide.
        window = fields.get("sliding_window")
        found = {"sliding_window": window, "sliding_layers": still} if window and any(still) else {}
    return found | ({"local_rope": Rope(kind="none"), "local_rope_layers": still} if any(still) else {})


def granite_scales(fields: Fields, raw: Raw) -> Raw:
    """What Granite multiplies the embeddings, the attention's logits and the output of each sublayer by."""
    return {
        "embedding_scale": float(fields.get("embedding_multiplier", 1.0)),
        "attention_scale": float(fields.get("attention_multiplier", 1.0)),
        "residual_scale": float(fields.get("residual_multiplier", 1.0)),
    }


def _exaone4(fields: Fields, raw: Raw) -> Raw:
    period, window = fields.get("sliding_window_pattern", 4), fields.get("sliding_window")
    if isinstance(period, str) and fields.get("layer_types") is None:
        raise fields.unsupported("sliding_window_pattern")
    found = windows(fields, 0 if isinstance(period, str) else period)
    if window is None:
        return found
    # With a window, layers that see everything are not turned.
    turned = read_rope(rope_fields(fields), fields)
    forget_ropes(raw)
    return found | {"rope": Rope(kind="none"), "local_rope": turned}


def _ernie(fields: Fields, raw: Raw) -> Raw:
    bias = fields.get("use_bias", False)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _hunyuan(fields: Fields, raw: Raw) -> Raw:
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    parameters = dict(raw.get(name) or {})
    alpha = parameters.pop("alpha", None)
    if alpha and parameters.get("rope_type", parameters.get("type")) == "dynamic":
        # Whatever their kind is called, alpha stretches the base alone.
        SCALE.check(alpha, f"{fields.origin}: alpha")
        dim = fields.get("head_dim", fields.need("hidden_size") // fields.need("num_attention_heads"))
        theta = parameters.get("rope_theta", raw.pop("rope_theta", 10_000.0)) * alpha ** (dim / (dim - 2))
        raw[name] = {"rope_type": "default", "rope_theta": theta}
    return {}


def _starcoder2(fields: Fields, raw: Raw) -> Raw:
    bias, layers = fields.get("use_bias", True), fields.need("num_hidden_layers")
    if raw.get("hidden_act") is None:
        raw["hidden_act"] = "gelu_pytorch_tanh"
    window = fields.get("sliding_window")
    slides = {"sliding_window": window, "sliding_layers": (True,) * layers} if window else {}
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, **slides}


def _phi(fields: Fields, raw: Raw) -> Raw:
    if fields.get("qk_layernorm", False):
        raise fields.unsupported("qk_layernorm")
    if raw.get("hidden_act") is None:
        raw["hidden_act"] = "gelu_new"
    return {}


def _ministral(fields: Fields, raw: Raw) -> Raw:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or _MINISTRAL_ROPE)
    for name in ("rope_parameters", "rope_scaling"):
        raw.pop(name, None)
    beta = parameters.pop("llama_4_scaling_beta", None)
    # What the file says of its context is said beside, too.
    parameters.pop("max_position_embeddings", None)
    raw["rope_parameters"] = parameters
    layers, window = fields.need("num_hidden_layers"), fields.get("sliding_window")
    if fields.get("layer_types", [""] * layers) != [""] * layers:
        raise fields.unsupported("layer_types")
    slides = {"sliding_window": window, "sliding_layers": (True,) * layers} if window else {}
    if not beta:
        return slides
    named = f"{fields.origin}: rope_parameters"
    grows = Fields(parameters | {"beta": beta}, named, {"beta": SCALE, _ORIGINAL: POSITIONS})
    return slides | {"temperature": Temperature(float(beta), grows.need(_ORIGINAL))}


def _seed(fields: Fields, raw: Raw) -> Raw:
    return {"qkv_bias": raw.get("attention_bias", True), "output_bias": fields.get("attention_out_bias", False)}


def _lfm2(fields: Fields, raw: Raw) -> Raw:
    if fields.get("conv_bias", False):
        raise fields.unsupported("conv_bias")
    if fields.get("num_heads") not in (None, raw.get("num_attention_heads")):
        raise fields.unsupported("num_heads")
    silu_alone(fields, raw)
    layers, attending = fields.need("num_hidden_layers"), fields.get("full_attn_idxs")
    types = raw.get("layer_types")
    if types is None:
        every = range(layers) if attending is None else attending
        types = ["full_attention" if layer in every else "conv" for layer in range(layers)]
    if len(types) != layers or any(kind not in ("conv", "full_attention") for kind in types):
        raise CorruptFile(
            f"{fields.origin}: layer_types should name conv or full_attention for each of {layers} layers"
        )
    inner = fields.get("block_ff_dim", fields.get("intermediate_size", 12_288))
    if fields.get("block_auto_adjust_ff_dim", True):
        unit = fields.get("block_multiple_of", 256)
        inner = int(fields.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // unit) * unit
    raw |= {"intermediate_size": inner}
    if (tied := fields.get("tie_embedding")) is not None:
        raw["tie_word_embeddings"] = tied
    convolving = tuple(kind == "conv" for kind in types)
    if not any(convolving):
        return {}
    return {"gated_conv": fields.get("conv_L_cache", 3), "conv_layers": convolving}


_ORIGINAL = "original_max_position_embeddings"
_MINISTRAL_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _ORIGINAL: 16_384, "llama_4_scaling_beta": 0.1},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
LFM2_PARTS = {
    "attention_norm": "operator_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "output": "self_attn.out_proj",
    "mlp_norm": "ffn_norm",
    **{"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
}
LFM2_CONVOLVING = {"qkv": "conv.in_proj", "output": "conv.out_proj", "conv": "conv.conv"}
_AFTER_NAMES = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
GRANITE_SCALES: dict[str, Kind] = dict.fromkeys(
    ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), SCALE
)
DENSE: dict[str, Family] = {
    "gemma": Family(fields={"hidden_activation": Text(64)}, derived=_gemma),
    "gemma2": Family(
        fields={
            "hidden_activation": Text(64),
            "query_pre_attn_scalar": SCALE,
            **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _CAP),
        },
        switches={"sandwich_norms": True},
        derived=_gemma2,
    ),
    "olmo3": Family(theta=500_000.0, switches={"wide_qk_norm": True}, derived=_olmo3, parts=_AFTER_NAMES),
    "smollm3": Family(
        theta=2_000_000.0,
        fields={
            "no_rope_layers": Listed(Whole(0, 1), MOST_LAYERS),
            "no_rope_layer_interval": LAYERS,
            "use_sliding_window": Flag(),
        },
        derived=_smollm3,
    ),
    "ernie4_5": Family(theta=500_000.0, fields={"use_bias": Flag()}, derived=_ernie),
    "exaone4": Family(
        fields={"sliding_window_pattern": Either(Whole(0, LAYERS.most), Text(MOST_LAYERS))},
        switches=_AFTER,
        derived=_exaone4,
        parts=_AFTER_NAMES,
    ),
    "hunyuan_v1_dense": Family(
        switches={"qk_norm": True, "norms_after_rope": True},
        derived=_hunyuan,
        parts={"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
    ),
    "glm": Family(switches={"output_bias": False}),
    "granite": Family(fields=GRANITE_SCALES, derived=granite_scales),
    "starcoder2": Family(
        names={"norm_epsilon": "rms_norm_eps"},
        fields={"use_bias": Flag(), "norm_epsilon": EPS},
        switches=_UNGATED,
        derived=_starcoder2,
        parts={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    "phi": Family(
        names={"layer_norm_eps": "rms_norm_eps"},
        fields={"qk_layernorm": Flag(), "layer_norm_eps": EPS},
        switches=_UNGATED
        | {"parallel": True, "head_bias": True, **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)},
        derived=_phi,
        parts={"mlp_norm": "input_layernorm", "output": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
        whole={"norm": "model.final_layernorm"},
    ),
    "lfm2": Family(
        theta=1_000_000.0,
        names={"norm_eps": "rms_norm_eps"},
        fields={
            "norm_eps": EPS,
            **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim", "tie_embedding"), Flag()),
            "num_heads": HEADS,
            "conv_L_cache": KERNEL,
            **dict.fromkeys(("block_multiple_of", "block_ff_dim", "intermediate_size"), WIDTH),
            "block_ffn_dim_multiplier": Number(2.0**-10, 2.0**10),
            "full_attn_idxs": Listed(Whole(0, MOST_LAYERS), MOST_LAYERS),
        },
        switches={"qk_norm": True},
        derived=_lfm2,
        parts=LFM2_PARTS,
        convolving=LFM2_CONVOLVING,
        whole={"norm": "model.embedding_norm"},
    ),
    "ministral3": Family(
        theta=1_000_000.0, switches=dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False), derived=_ministral
    ),
    "seed_oss": Family(fields={"attention_out_bias": Flag()}, derived=_seed),
}
