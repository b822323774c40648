"""GGUF files of hybrids: layers with states or convolutions beside attention."""

from __future__ import annotations

from decodery.core.errors import CorruptFile, UnsupportedModel

from .fields import Fields
from .gguf_architecture import NORMED, Architecture, Raw, experts, inner, turned
from .gguf_file import GGUFFile


def _lfm2(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    # There are no key-value heads where a layer convolves.
    kinds = [f"blk.{layer}.shortconv.conv.weight" in file.tensors for layer in range(raw["num_hidden_layers"])]
    return {
        "layer_types": ["conv" if convolves else "full_attention" for convolves in kinds],
        "conv_L_cache": fields.need("shortconv.l_cache"),
        "norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    if fields.get("expert_gating_func", 2) != 2:
        raise fields.unsupported("expert_gating_func")
    own = _lfm2(fields, file, raw) | experts(fields)
    dense = fields.get("leading_dense_block_count", 0)
    return {name: value for name, value in own.items() if name != "block_auto_adjust_ff_dim"} | {
        "num_dense_layers": dense,
        "moe_intermediate_size": inner(fields, file),
        "norm_topk_prob": fields.get("expert_weights_norm", True),
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in file.tensors,
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
    }


def _states(fields: Fields) -> tuple[int, int, int, int, int]:
    """Heads, their width, groups, states and the kernel of Mamba-2 layers."""
    heads, width = fields.need("ssm.time_step_rank"), fields.need("ssm.inner_size")
    if width % heads:
        raise CorruptFile(f"{fields.origin}: {heads} states do not fit {width} inner units")
    groups, state = fields.get("ssm.group_count", 1), fields.need("ssm.state_size")
    return heads, width // heads, groups, state, fields.need("ssm.conv_kernel")


def _granitehybrid(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    heads, size, groups, state, kernel = _states(fields)
    kinds = [f"blk.{layer}.ssm_in.weight" in file.tensors for layer in range(raw["num_hidden_layers"])]
    count = fields.get("expert_count", 0)
    shared = "blk.0.ffn_gate_shexp.weight" if count else "blk.0.ffn_gate.weight"
    return {
        "layer_types": ["linear_attention" if recurs else "full_attention" for recurs in kinds],
        **{"mamba_n_heads": heads, "mamba_d_head": size, "mamba_n_groups": groups, "mamba_d_state": state},
        # Rounded down when it is used.
        **{"mamba_d_conv": kernel, "mamba_expand": (heads * size + 0.5) / raw["hidden_size"]},
        "attention_multiplier": fields.get("attention.scale", raw["head_dim"] ** -0.5),
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "logits_scaling": fields.get("logit_scale", 1.0),
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": count,
        "num_experts_per_tok": fields.get("expert_used_count", 0),
        "intermediate_size": inner(fields, file) if count else file.info(shared).shape[0],
        "shared_intermediate_size": file.info(shared).shape[0],
    }


def regular(origin: str, found: list[bool]) -> tuple[int, int]:
    """Period and offset of layers of a kind; one after the last layer where there is none."""
    layers = [layer for layer, has in enumerate(found) if has] or [len(found)]
    period = layers[1] - layers[0] if len(layers) > 1 else max(len(found), layers[0] + 1)
    if [layer % period == layers[0] for layer in range(len(found))] != found:
        raise UnsupportedModel(f"{origin}: layers {layers} do not follow each other evenly, as those of this family do")
    return period, layers[0]


def _jamba(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers, origin = range(raw["num_hidden_layers"]), fields.origin
    attends = [f"blk.{layer}.attn_q.weight" in file.tensors for layer in layers]
    mixes = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in layers]
    attention, mixing = regular(origin, attends), regular(origin, mixes)
    count = fields.get("expert_count", 0)
    return {
        **dict(zip(("attn_layer_period", "attn_layer_offset"), attention, strict=True)),
        **dict(zip(("expert_layer_period", "expert_layer_offset"), mixing, strict=True)),
        "num_experts": count if any(mixes) else 1,
        "num_experts_per_tok": fields.get("expert_used_count", 0) or 1,
        # Rounded down when it is used.
        "mamba_expand": (fields.need("ssm.inner_size") + 0.5) / raw["hidden_size"],
        "mamba_dt_rank": fields.need("ssm.time_step_rank"),
        "mamba_d_state": fields.need("ssm.state_size"),
        "mamba_d_conv": fields.need("ssm.conv_kernel"),
    }


def _nemotron(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    heads, size, groups, state, kernel = _states(fields)
    if fields.get("expert_group_count", 1) > 1:
        raise fields.unsupported("expert_group_count")
    # Layers that predict further tokens are counted among the others.
    layers = raw["num_hidden_layers"] - fields.get("nextn_predict_layers", 0)
    parts = {"linear_attention": "ssm_in", "full_attention": "attn_q", "moe": "ffn_gate_inp", "mlp": "ffn_up"}
    found = [[kind for kind, part in parts.items() if f"blk.{layer}.{part}.weight" in file.tensors]
             for layer in range(max(layers, 0))]  # fmt: skip
    if not all(found):
        raise CorruptFile(f"{fields.origin}: layer {found.index([])} has no tensors: the file is incomplete")
    kinds = [each[0] for each in found]
    units = fields.get("feed_forward_length", 0)
    most = units if isinstance(units, int) else max((int(each) for each in units), default=1)
    mixed = {}
    if "moe" in kinds:
        first = kinds.index("moe")
        mixed = {
            "n_routed_experts": fields.need("expert_count"),
            "num_experts_per_tok": fields.need("expert_used_count"),
            "moe_intermediate_size": file.info(f"blk.{first}.ffn_up_exps.weight").shape[1],
            "moe_shared_expert_intermediate_size": file.info(f"blk.{first}.ffn_up_shexp.weight").shape[0],
            "norm_topk_prob": fields.get("expert_weights_norm", True),
            "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        }
    return mixed | {
        "layers_block_type": kinds,
        "intermediate_size": max(most, 1),
        "layer_norm_epsilon": fields.need("attention.layer_norm_rms_epsilon"),
        **{"mamba_num_heads": heads, "mamba_head_dim": size, "n_groups": groups, "ssm_state_size": state},
        "conv_kernel": kernel,
        # Which llama.cpp does not bound.
        "time_step_min": 0.0,
    }


def _gated(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    heads, width = fields.need("ssm.time_step_rank"), fields.need("ssm.inner_size")
    if width % heads:
        raise CorruptFile(f"{fields.origin}: {heads} states do not fit {width} inner units")
    # Layers that predict further tokens are counted among the others.
    layers = raw["num_hidden_layers"] - fields.get("nextn_predict_layers", 0)
    interval = fields.get("full_attention_interval", 4)
    every = [(layer + 1) % interval != 0 for layer in range(max(layers, 0))]
    recurrent = [bool(each) for each in fields.get("attention.recurrent_layers", every)][:layers]
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": fields.need("ssm.group_count"),
        "linear_key_head_dim": fields.need("ssm.state_size"),
        "linear_conv_kernel_dim": fields.need("ssm.conv_kernel"),
        "attention_bias": any(f"blk.{layer}.attn_q.bias" in file.tensors for layer in range(max(layers, 0))),
        **turned(fields, raw),
    }


def _gated_mixture(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {
        **_gated(fields, file, raw),
        **experts(fields),
        "moe_intermediate_size": inner(fields, file),
        "shared_expert_intermediate_size": file.info("blk.0.ffn_gate_shexp.weight").shape[0],
        "norm_topk_prob": True,
    }


_MAMBA = {
    **{"qkv": "ssm_in.weight", "output": "ssm_out.weight", "conv": "ssm_conv1d.weight"},
    **{"conv_bias": "ssm_conv1d.bias", "step_bias": "ssm_dt.bias", "decay": "ssm_a", "skip": "ssm_d"},
    "gate_norm": "ssm_norm.weight",
}
_SELECTIVE = {
    **{name: part for name, part in _MAMBA.items() if name != "gate_norm"},
    **{"select_in": "ssm_x.weight", "select_out": "ssm_dt.weight"},
    **{f"{part}_norm": f"ssm_{part}_norm.weight" for part in ("dt", "b", "c")},
}
_CONVOLVING = {"qkv": "shortconv.in_proj", "output": "shortconv.out_proj", "conv": "shortconv.conv"}
_NEMOTRON = Architecture(
    "nemotron_h",
    more=_nemotron,
    parts={"mlp_norm": "attn_norm"},
    exact={"choice_bias": "exp_probs_b.bias"},
    recurrent=_MAMBA,
    fixed={"expert_gating_func": 2},
)
_DELTA = {
    "output": "ssm_out.weight",
    "mixed": "attn_qkv.weight",
    "mix_gate": "attn_gate.weight",
    "conv": "ssm_conv1d.weight",
    "step_bias": "ssm_dt.bias",
    "decay": "ssm_a",
    "gate_norm": "ssm_norm.weight",
}
_APART = _DELTA | {"mix_written": "ssm_beta.weight", "mix_steps": "ssm_alpha.weight"}
_GATED = {"mlp_norm": "post_attention_norm", "out_gate": "attn_q"}
HYBRIDS: dict[str, Architecture] = {
    "lfm2": Architecture(
        "lfm2",
        more=_lfm2,
        convolving=_CONVOLVING,
        norm="token_embd_norm",
        theta=1_000_000.0,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        more=_lfm2moe,
        exact={"choice_bias": "exp_probs_b.bias"},
        convolving=_CONVOLVING,
        norm="token_embd_norm",
        theta=1_000_000.0,
    ),
    "granitehybrid": Architecture("granitemoehybrid", paired=True, more=_granitehybrid, recurrent=_MAMBA, fixed=NORMED),
    "jamba": Architecture("jamba", more=_jamba, recurrent=_SELECTIVE),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    "qwen3next": Architecture(
        "qwen3_next",
        more=_gated_mixture,
        parts=_GATED,
        recurrent=_DELTA | dict.fromkeys(("mix_written", "mix_steps"), "ssm_ba.weight"),
        fixed=NORMED,
    ),
    "qwen35": Architecture("qwen3_5_text", more=_gated, parts=_GATED, recurrent=_APART, in_turns=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", more=_gated_mixture, parts=_GATED, recurrent=_APART, in_turns=True, fixed=NORMED
    ),
}
"""By what files call them."""
