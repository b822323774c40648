"""Gemma 3n and Gemma 4 (text): layers that read tokens, share keys and values, and differ in width.

Alternating streams and learned residuals (Gemma 3n); heads of two widths, values made by the matrix of keys, scales of
layers and experts beside an MLP (Gemma 4).
"""

from __future__ import annotations

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    MOST_LAYERS,
    MOST_STREAMS,
    TOKENS,
    WIDTH,
    Alternating,
    ModelConfig,
)
from ..loaders.fields import Anything, Either, Fields, Flag, Kind, Listed, Named, Number, Record, Text, Whole
from ..torch.rope_config import ropes_by_kind
from .family import Family, Raw, forget_ropes, windows

_THETAS = 1_000_000.0, 10_000.0


def _shared(fields: Fields, raw: Raw) -> Raw:
    """What both families have."""
    raw["hidden_act"] = fields.get("hidden_activation", "gelu_pytorch_tanh")
    whole, local = ropes_by_kind(fields, _THETAS)
    forget_ropes(raw)
    inputs = fields.get("hidden_size_per_layer_input", 256)
    return {
        "embedding_scale": float(fields.need("hidden_size")) ** 0.5,
        "attention_scale": 1.0,
        "rope": whole,
        "local_rope": local,
        "reused_layers": fields.get("num_kv_shared_layers", 0),
        **(
            {"layer_inputs": inputs, "layer_tokens": fields.get("vocab_size_per_layer_input", 262_144)}
            if inputs
            else {}
        ),
    }


def _each(value: float | list[float], layers: int, name: str, origin: str) -> list[float]:
    """A value for each layer, from one for all of them or a list."""
    found = value if isinstance(value, list) else [value] * layers
    if len(found) != layers:
        raise CorruptFile(f"{origin}: {name} should have a value for each of the {layers} layers")
    return found


def _gemma3n(fields: Fields, raw: Raw) -> Raw:
    layers, origin = fields.need("num_hidden_layers"), fields.origin
    inners = _each(fields.get("intermediate_size", 16_384), layers, "intermediate_size", origin)
    raw["intermediate_size"] = int(max(inners))
    sparse = min(10, layers) if layers > 10 else 0
    shares = fields.get("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (layers - sparse))
    shares = [float(share) for share in _each(shares, layers, "activation_sparsity_pattern", origin)]
    return {
        **_shared(fields, raw),
        **windows(fields, 5),
        "reused_layers": fields.get("num_kv_shared_layers", 15),
        "logit_cap": fields.get("final_logit_softcapping", 30.0),
        "alternating": Alternating(
            fields.get("altup_num_inputs", 4),
            fields.get("altup_active_idx", 0),
            fields.get("laurel_rank", 64),
            fields.get("altup_correct_scale", True),
        ),
        **({"inners": tuple(int(each) for each in inners)} if len(set(inners)) > 1 else {}),
        **({"sparsity": tuple(shares)} if any(shares) else {}),
    }


def _head_shapes(fields: Fields, whole: list[bool]) -> list[tuple[int, int]]:
    """Key-value heads of every layer and their width. whole: which layers see everything."""
    plain = {"head_dim": fields.get("head_dim", 256), "num_key_value_heads": fields.get("num_key_value_heads", 4)}
    shapes = [dict(plain) for _ in whole]
    named = fields.get("per_layer_config")
    if named is None:
        own = {"head_dim": fields.get("global_head_dim", 512)}
        if fields.get("attention_k_eq_v", False) and (heads := fields.get("num_global_key_value_heads")):
            own["num_key_value_heads"] = heads
        named = {str(layer): own for layer, sees in enumerate(whole) if sees}
    for layer, own in named.items():
        if not layer.isdecimal() or int(layer) >= len(whole):
            raise CorruptFile(f"{fields.origin}: per_layer_config names layer {layer[:32]!r} of {len(whole)}")
        if unknown := next((name for name in sorted(own) if name not in _OWN), None):
            raise UnsupportedModel(
                f"{fields.origin}: per_layer_config has {unknown[:64]!r}, which is not supported here"
            )
        shapes[int(layer)] |= {name: value for name, value in own.items() if value is not None}
    return [(shape["num_key_value_heads"], shape["head_dim"]) for shape in shapes]


def _gemma4(fields: Fields, raw: Raw) -> Raw:
    if fields.get("use_bidirectional_attention") == "all":
        raise fields.unsupported("use_bidirectional_attention")
    layers = fields.need("num_hidden_layers")
    if not raw.get("rope_parameters"):
        own = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _THETAS[0]}
        fields = Fields(fields.raw | {"rope_parameters": {"full_attention": own}}, fields.origin, fields.kinds)
    found = _shared(fields, raw) | windows(fields, 6)
    # The last layer sees everything, whatever is said of it.
    sliding = (*found["sliding_layers"][:-1], False)
    shapes = _head_shapes(fields, [not slides for slides in sliding])
    widest = max(dim for _, dim in shapes)
    rows = max(-(-heads * dim // widest) for heads, dim in shapes)
    raw |= {"head_dim": widest, "num_key_value_heads": rows}
    inner, reused = fields.need("intermediate_size"), found["reused_layers"]
    wide = reused if fields.get("use_double_wide_mlp", False) else 0
    experts = fields.get("enable_moe_block", False)
    if experts and wide:
        raise fields.unsupported("use_double_wide_mlp")
    for name in ("num_experts", "num_local_experts"):
        raw.pop(name, None)
    mixed = {}
    if experts:
        raw["intermediate_size"] = fields.need("moe_intermediate_size")
        counts = {"experts": fields.need("num_experts"), "experts_per_token": fields.need("top_k_experts")}
        mixed = counts | {"experts_beside": True, "normed_experts": True, "shared_inner": inner}
    return {
        **found,
        "sliding_layers": sliding,
        "sliding_window": found["sliding_window"] if any(sliding) else None,
        "head_shapes": tuple(shapes) if len(set(shapes)) > 1 else (),
        "keys_as_values": fields.get("attention_k_eq_v", False),
        "layer_scales": True,
        "logit_cap": fields.get("final_logit_softcapping", 0.0),
        **({"inners": (inner,) * (layers - wide) + (2 * inner,) * wide} if wide else {}),
        **mixed,
    }


def unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor makes keys or values of a layer that reads those of an earlier one."""
    head, _, kind = name.rpartition(".self_attn.")
    layer = head.rpartition(".")[2]
    reused = layer.isdecimal() and config.num_layers - config.reused_layers <= int(layer) < config.num_layers
    return reused and kind.split(".")[0] in ("k_proj", "v_proj", "k_norm", "v_norm")


_OWN: dict[str, Kind] = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS}
_BOTH: dict[str, Kind] = {
    "hidden_activation": Text(64),
    "num_kv_shared_layers": Whole(0, MOST_LAYERS),
    "hidden_size_per_layer_input": Whole(0, WIDTH.most),
    "vocab_size_per_layer_input": TOKENS,
    "final_logit_softcapping": Number(0.0, 1e6),
}
_SHARE = Number(0.0, 1.0)
_GEMMA3N: dict[str, Kind] = {
    **_BOTH,
    "intermediate_size": Either(WIDTH, Listed(WIDTH, MOST_LAYERS)),
    "altup_num_inputs": Whole(2, MOST_STREAMS),
    "altup_active_idx": Whole(0, MOST_STREAMS),
    # Bounds weights while they are trained.
    "altup_coef_clip": Number(0.0, 1e9),
    "altup_correct_scale": Flag(),
    "laurel_rank": HEADS,
    "activation_sparsity_pattern": Either(_SHARE, Listed(_SHARE, MOST_LAYERS)),
}
_GEMMA4: dict[str, Kind] = {
    **_BOTH,
    "intermediate_size": WIDTH,
    "num_key_value_heads": HEADS,
    "global_head_dim": HEAD_DIM,
    "num_global_key_value_heads": HEADS,
    "per_layer_config": Named(Record(_OWN), MOST_LAYERS),
    **dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"), Flag()),
    **dict.fromkeys(("num_experts", "top_k_experts"), EXPERTS),
    "moe_intermediate_size": WIDTH,
    # Images alone are read in both directions.
    "use_bidirectional_attention": Anything(),
}
_INPUTS = {"input_gate": "per_layer_input_gate", "input_out": "per_layer_projection"}
_WHOLE = {
    "token_inputs": "model.embed_tokens_per_layer",
    "input_projection": "model.per_layer_model_projection",
    "input_norm": "model.per_layer_projection_norm",
}
_STREAMS = {
    f"stream_{way}_{number}": f"model.altup_{name}.{number}"
    for way, name in (("in", "projections"), ("out", "unembed_projections"))
    for number in range(MOST_STREAMS)
}
_SWITCHES = {"sandwich_norms": True, "qk_norm": True, "unit_values": True}
_FOUR = Family(
    fields=_GEMMA4,
    switches=_SWITCHES,
    derived=_gemma4,
    parts={
        **_INPUTS,
        "input_norm": "post_per_layer_input_norm",
        "router": "router.proj",
        **{f"shared_{half}": f"mlp.{half}_proj" for half in ("gate", "up", "down")},
        "experts_norm": "pre_feedforward_layernorm_2",
        "post_shared_norm": "post_feedforward_layernorm_1",
        "post_experts_norm": "post_feedforward_layernorm_2",
    },
    exact={
        "scale": "layer_scalar",
        "router_scale": "router.scale",
        "expert_scales": "router.per_expert_scale",
    },
    experts={half: f"experts.{{}}.{half}_proj" for half in ("gate", "up", "down")},
    whole=_WHOLE,
)
GEMMA: dict[str, Family] = {
    "gemma3n_text": Family(
        fields=_GEMMA3N,
        switches=_SWITCHES,
        derived=_gemma3n,
        parts={
            **_INPUTS,
            "input_norm": "post_per_layer_input_norm",
            "laurel_in": "laurel.linear_left",
            "laurel_out": "laurel.linear_right",
            "laurel_norm": "laurel.post_laurel_norm",
            "stream_norm": "altup.router_norm",
            "stream_router": "altup.modality_router",
            "stream_predict": "altup.prediction_coefs",
            "stream_correct": "altup.correction_coefs",
        },
        exact={"stream_scale": "altup.correct_output_scale"},
        whole=_WHOLE | _STREAMS,
    ),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _FOUR),
}
