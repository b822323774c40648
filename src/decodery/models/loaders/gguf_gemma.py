"""GGUF files of Gemma 3n and Gemma 4."""

from __future__ import annotations

import math

import numpy as np

from decodery.core.errors import CorruptFile

from ..config import ModelConfig
from .fields import Fields
from .gguf_architecture import Architecture, Raw, refuse_other_widths
from .gguf_file import GGUFFile
from .gguf_rope import FREQUENCIES

_STILL = 1e29
"""What divides the frequency of a pair that is not turned, or more."""
STREAMS = {"stream_in": "altup_proj.weight", "stream_out": "altup_unembd_proj.weight"}
"""The tensors that hold the matrices of all streams, by what begins the names of their parts."""
WHOLE = {
    "token_inputs": "per_layer_token_embd",
    "input_projection": "per_layer_model_proj",
    "input_norm": "per_layer_proj_norm",
}


def _kinds(fields: Fields, layers: int, period: int) -> Raw:
    """The window, and which layers have it."""
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)] if pattern else [False] * layers
    if len(pattern) != layers:
        raise CorruptFile(f"{fields.origin}: attention.sliding_window_pattern should have {layers} values")
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"sliding_window": fields.get("attention.sliding_window") or None, "layer_types": kinds}


def _both(fields: Fields, file: GGUFFile, layers: int, period: int, reused: int) -> Raw:
    """What both families have but for the rotation of layers without a window."""
    inputs = fields.get("embedding_length_per_layer_input", 0)
    tokens = {"vocab_size_per_layer_input": file.info("per_layer_token_embd.weight").shape[0]} if inputs else {}
    return {
        "num_kv_shared_layers": fields.get("attention.shared_kv_layers", reused),
        "hidden_size_per_layer_input": inputs,
        **tokens,
        **_kinds(fields, layers, period),
    }


def _ropes(fields: Fields, whole: Raw) -> Raw:
    whole = whole | {"rope_theta": fields.get("rope.freq_base", 1_000_000.0)}
    local = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 10_000.0)}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def _inners(fields: Fields, layers: int) -> list[int]:
    """Inner units of every layer's MLP."""
    found = fields.get("feed_forward_length")
    if found is None or (not isinstance(found, int) and len(found) != layers):
        raise CorruptFile(f"{fields.origin}: feed_forward_length should have a value for each of {layers} layers")
    return [found] * layers if isinstance(found, int) else [int(each) for each in found]


def _gemma3n(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers, heads = raw["num_hidden_layers"], fields.need("attention.head_count_kv")
    if not isinstance(heads, int):
        raise fields.unsupported("attention.head_count_kv")
    refuse_other_widths(fields, raw["head_dim"])
    # Files say how many spreads beyond the middle the bound lies.
    reaches = fields.get("activation_sparsity_scale", np.full(layers, -np.inf))
    shares = [0.5 * (1.0 + math.erf(float(each) / math.sqrt(2.0))) for each in reaches]
    return {
        **_both(fields, file, layers, 5, max(layers - 20, 0)),
        **_ropes(fields, {"rope_type": "default"}),
        "num_key_value_heads": heads,
        "intermediate_size": _inners(fields, layers),
        "altup_num_inputs": fields.get("altup.num_inputs", 4),
        "altup_active_idx": fields.get("altup.active_idx", 0),
        "laurel_rank": file.info("blk.0.laurel_l.weight").shape[0],
        "final_logit_softcapping": fields.get("final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": shares,
    }


def _gemma4(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers = raw["num_hidden_layers"]
    found = _both(fields, file, layers, 6, 0)
    heads = fields.get("attention.head_count_kv", raw["num_attention_heads"])
    each = [heads] * layers if isinstance(heads, int) else [int(count) for count in heads]
    if len(each) != layers:
        raise CorruptFile(f"{fields.origin}: attention.head_count_kv should have a value for each of {layers} layers")
    local, wide = fields.get("attention.key_length_swa", raw["head_dim"]), raw["head_dim"]
    for name, width in (
        *(("attention.value_length_swa", local), ("rope.dimension_count_swa", local)),
        *(("attention.value_length", wide), ("rope.dimension_count", wide)),
    ):
        if fields.get(name, width) != width:
            raise fields.unsupported(name)
    slides = [kind == "sliding_attention" for kind in found["layer_types"]]
    own = {
        str(layer): {"head_dim": local if slides[layer] else wide, "num_key_value_heads": count}
        for layer, count in enumerate(each)
    }
    inners, reused = _inners(fields, layers), found["num_kv_shared_layers"]
    wider = inners[-1] == 2 * inners[0]
    if inners != [inners[0]] * (layers - reused) + [inners[0] * (1 + wider)] * reused:
        raise fields.unsupported("feed_forward_length")
    experts = {}
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        experts = {
            "enable_moe_block": True,
            "num_experts": fields.need("expert_count"),
            "top_k_experts": fields.need("expert_used_count"),
            "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        }
    keys = [layer for layer in range(layers - reused) if f"blk.{layer}.attn_v.weight" not in file.tensors]
    if keys and keys != [layer for layer in range(layers - reused) if not slides[layer]]:
        raise CorruptFile(f"{fields.origin} has no tensor blk.{keys[0]}.attn_v.weight: the file is incomplete")
    return {
        **found,
        **_ropes(fields, _proportional(file, wide, fields.origin)),
        "head_dim": local,
        "num_key_value_heads": max(each),
        "per_layer_config": own,
        "intermediate_size": inners[0],
        "use_double_wide_mlp": wider,
        "attention_k_eq_v": bool(keys),
        "final_logit_softcapping": fields.get("final_logit_softcapping", 0.0),
        **experts,
    }


def _proportional(file: GGUFFile, dim: int, origin: str) -> Raw:
    """The rotation of layers that see everything, whose last pairs are not turned."""
    if FREQUENCIES not in file.tensors:
        return {"rope_type": "default"}
    factors = file.rows(FREQUENCIES) if file.info(FREQUENCIES).shape == (dim // 2,) else np.zeros(dim // 2)
    turned = int((factors == 1.0).sum())
    if not ((factors[:turned] == 1.0).all() and (factors[turned:] >= _STILL).all()):
        raise CorruptFile(f"{origin}: {FREQUENCIES} should turn the first pairs of {dim // 2} and leave the others")
    # Rounded down when it is used.
    return {"rope_type": "proportional", "partial_rotary_factor": min((turned + 0.25) / (dim // 2), 1.0)}


def unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor makes keys or values of a layer that reads those of an earlier one."""
    place = name.split(".")
    reused = len(place) == 4 and place[0] == "blk" and place[1].isdecimal()
    reused = reused and config.num_layers - config.reused_layers <= int(place[1]) < config.num_layers
    return reused and place[2] in ("attn_k", "attn_v", "attn_k_norm")


_INPUTS = {"input_gate": "inp_gate", "input_out": "proj", "input_norm": "post_norm"}
_ALTERNATING = {
    **{"laurel_in": "laurel_l", "laurel_out": "laurel_r", "laurel_norm": "laurel_post_norm"},
    **{"stream_norm": "altup_router_norm", "stream_router": "altup_router", "stream_scale": "altup_correct_scale"},
    **{"stream_predict": "altup_predict_coef", "stream_correct": "altup_correct_coef"},
}
_EXPERTS = {
    **{f"shared_{half}": f"ffn_{half}" for half in ("gate", "up", "down")},
    **{"experts_norm": "pre_ffw_norm_2", "post_shared_norm": "post_ffw_norm_1", "post_experts_norm": "post_ffw_norm_2"},
}
GEMMA: dict[str, Architecture] = {
    "gemma3n": Architecture("gemma3n_text", more=_gemma3n, parts=_INPUTS | _ALTERNATING, ropes=True),
    "gemma4": Architecture(
        "gemma4_text",
        more=_gemma4,
        parts=_INPUTS | _EXPERTS | {"scale": "layer_output_scale"},
        exact={"router_scale": "ffn_gate_inp.scale", "expert_scales": "ffn_down_exps.scale"},
        ropes=True,
    ),
}
"""By what files call them."""
