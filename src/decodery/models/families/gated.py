"""Families of Gated DeltaNet layers and gated attention: Qwen3-Next, and Qwen3.5 with and without experts."""

from __future__ import annotations

from decodery.core.errors import CorruptFile

from ..config import HEAD_DIM, HEADS, KERNEL, LAYERS, GatedDelta
from ..loaders.fields import Fields, Kind
from .family import Family, Raw, silu_alone
from .mixed import QWEN, QWEN_SHARED, every_layer
from .seeing import of_text

_KINDS = {"linear_attention": True, "full_attention": False}
_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    "linear_conv_kernel_dim": KERNEL,
    "full_attention_interval": LAYERS,
}


def _derived(fields: Fields, raw: Raw) -> Raw:
    silu_alone(fields, raw)
    layers, interval = fields.need("num_hidden_layers"), fields.get("full_attention_interval", 4)
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    if len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise CorruptFile(f"{fields.origin}: layer_types should name one of {', '.join(_KINDS)} for each layer")
    raw |= of_text(raw)
    delta = GatedDelta(
        fields.get("linear_num_value_heads", 32),
        fields.get("linear_value_head_dim", 128),
        fields.get("linear_num_key_heads", 16),
        fields.get("linear_key_head_dim", 128),
        fields.get("linear_conv_kernel_dim", 4),
    )
    recurrent = tuple(_KINDS[kind] for kind in kinds)
    return {"delta": delta, "state_layers": recurrent} if any(recurrent) else {}


def _mixture(fields: Fields, raw: Raw) -> Raw:
    every_layer(fields)
    raw["intermediate_size"] = fields.need("moe_intermediate_size")
    return _derived(fields, raw) | {
        "experts": fields.need("num_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "normed_experts": fields.get("norm_topk_prob", True),
        "shared_inner": fields.need("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


_SWITCHES = {"qk_norm": True, "gated_attention": True}
_RECURRENT = {
    "output": "linear_attn.out_proj.weight",
    "conv": "linear_attn.conv1d.weight",
    "step_bias": "linear_attn.dt_bias",
    "decay": "linear_attn.A_log",
    "gate_norm": "linear_attn.norm.weight",
}
_APART = {"mix_gate": "z", "mixed": "qkv", "mix_written": "b", "mix_steps": "a"}
_FIVE = _RECURRENT | {part: f"linear_attn.in_proj_{name}.weight" for part, name in _APART.items()}
_NEXT = _RECURRENT | {
    **dict.fromkeys(("mix_gate", "mixed"), "linear_attn.in_proj_qkvz.weight"),
    **dict.fromkeys(("mix_written", "mix_steps"), "linear_attn.in_proj_ba.weight"),
}
_GATE = {"out_gate": "self_attn.q_proj"}
GATED_DELTA: dict[str, Family] = {
    "qwen3_next": Family(
        fields=QWEN | _FIELDS, switches=_SWITCHES, derived=_mixture, parts=QWEN_SHARED | _GATE, recurrent=_NEXT
    ),
    "qwen3_5_text": Family(fields=_FIELDS, switches=_SWITCHES, derived=_derived, parts=_GATE, recurrent=_FIVE),
    "qwen3_5_moe_text": Family(
        fields=QWEN | _FIELDS, switches=_SWITCHES, derived=_mixture, parts=QWEN_SHARED | _GATE, recurrent=_FIVE
    ),
}
