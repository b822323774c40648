"""GGUF files of the families that `families.dense` and others restate, as llama.cpp's converter writes them.

What a file says is put into the names of a config.json and read as one, so that a family is described once. Norms are
ready to multiply in these files; rows of queries and keys are in the order that the architecture's rotation has.
"""

from __future__ import annotations

from dataclasses import replace

from decodery.core.errors import CorruptFile

from ..config import ModelConfig
from ..families.config_json import read_config
from .fields import Fields
from .gguf_architecture import NORMED, Architecture, Raw, biased, experts, inner, turned
from .gguf_file import GGUFFile
from .gguf_gemma import GEMMA
from .gguf_hybrids import HYBRIDS


def _types(fields: Fields, layers: int, period: int, window: int | None = None) -> Raw:
    """The window, and which layers have it: as the file says, else all but every `period`-th one."""
    window = fields.get("attention.sliding_window", window)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        sliding = [pattern > 0 and (layer + 1) % pattern != 0 for layer in range(layers)]
    elif len(pattern) != layers:
        raise CorruptFile(f"{fields.origin}: attention.sliding_window_pattern should have {layers} values")
    else:
        sliding = [bool(value) for value in pattern]
    kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return {"sliding_window": window if any(sliding) else None, "layer_types": kinds}


def _gemma2(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers = raw["num_hidden_layers"]
    # The largest one alone scales by the width of its heads in the residual stream.
    scalar = raw["hidden_size"] // raw["num_attention_heads"] if layers == 46 else raw["head_dim"]
    return {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": fields.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.get("final_logit_softcapping", 30.0),
        **_types(fields, layers, 2, 4096),
    }


def _phi3(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {"sliding_window": fields.get("attention.sliding_window") or None, **turned(fields, raw)}


def _olmo2(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    window = fields.get("attention.sliding_window")
    return {"model_type": "olmo3", **_types(fields, raw["num_hidden_layers"], 4)} if window else {}


def _smollm3(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {"no_rope_layer_interval": 4, "attention_bias": biased(file), "mlp_bias": biased(file, "ffn_down")}


def _granite(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    if not fields.get("rope.scaling.finetuned", True):
        raise fields.unsupported("rope.scaling.finetuned")
    scale = fields.get("attention.scale", raw["head_dim"] ** -0.5)
    return {
        "attention_multiplier": scale,
        "embedding_multiplier": fields.get("embedding_scale", 1.0),
        "residual_multiplier": fields.get("residual_scale", 1.0),
        "logits_scaling": fields.get("logit_scale", 1.0),
        "attention_bias": biased(file),
        "mlp_bias": biased(file, "ffn_down"),
    }


def _granitemoe(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    counts = experts(fields)
    shared = "blk.0.ffn_gate_shexp.weight"
    return {
        **{name: value for name, value in _granite(fields, file, raw).items() if name != "mlp_bias"},
        "num_local_experts": counts["num_experts"],
        "num_experts_per_tok": counts["num_experts_per_tok"],
        "intermediate_size": inner(fields, file),
        "shared_intermediate_size": file.info(shared).shape[0] if shared in file.tensors else 0,
    }


def _olmoe(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {
        **experts(fields),
        "intermediate_size": inner(fields, file),
        "norm_topk_prob": fields.get("expert_weights_norm", False),
        "attention_bias": biased(file),
    }


def _exaone4(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers = raw["num_hidden_layers"]
    return _types(fields, layers, 4, 4096 if layers == 64 else None)


def _glm4(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {"attention_bias": biased(file), **turned(fields, raw)}


def _starcoder2(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    eps, window = fields.need("attention.layer_norm_epsilon"), fields.get("attention.sliding_window") or None
    return {"norm_epsilon": eps, "use_bias": biased(file), "sliding_window": window}


def _phi2(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {"layer_norm_eps": fields.need("attention.layer_norm_epsilon"), **turned(fields, raw)}


def _seed(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    return {
        "attention_bias": biased(file),
        "attention_out_bias": biased(file, "attn_output"),
        "mlp_bias": biased(file, "ffn_down"),
    }


def _qwen2moe(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    shared = file.info("blk.0.ffn_gate_shexp.weight").shape[0]
    return {
        **experts(fields),
        "moe_intermediate_size": inner(fields, file),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": fields.get("expert_weights_norm", False),
        "qkv_bias": biased(file),
    }


def _qwen3moe(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    units = inner(fields, file)
    return {**experts(fields), "moe_intermediate_size": units, "norm_topk_prob": True, "attention_bias": biased(file)}


def _glm4moe(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    if fields.get("expert_gating_func", 2) != 2:
        raise fields.unsupported("expert_gating_func")
    counts = experts(fields)
    # Layers that predict further tokens are counted among the others.
    layers = raw["num_hidden_layers"] - fields.get("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": layers,
        "n_routed_experts": counts["num_experts"],
        "num_experts_per_tok": counts["num_experts_per_tok"],
        "n_shared_experts": fields.get("expert_shared_count", 1),
        "moe_intermediate_size": inner(fields, file),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", True),
        "n_group": fields.get("expert_group_count", 1),
        "topk_group": fields.get("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": biased(file),
        **turned(fields, raw),
    }


def _gpt_oss(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    counts = experts(fields)
    return {
        "num_local_experts": counts["num_experts"],
        "num_experts_per_tok": counts["num_experts_per_tok"],
        "intermediate_size": inner(fields, file),
        "attention_bias": biased(file),
        # Said by the file's own keys.
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        **_types(fields, raw["num_hidden_layers"], 2),
    }


def _mistral3(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    scale, length = fields.get("attention.temperature_scale"), fields.get("rope.scaling.original_context_length")
    if not scale:
        return {"sliding_window": None}
    if not length:
        raise CorruptFile(f"{fields.origin}: queries grow with their position, and no original context says how fast")
    # How it stretches the rotation is said by the file's own keys.
    own = {"rope_type": "default", "llama_4_scaling_beta": float(scale), "original_max_position_embeddings": length}
    return {"model_type": "ministral3", "rope_parameters": own}


_CHUNK = 8192
"""Of attention in Llama 4, and of the positions over which its queries grow: no file says it."""


def _llama4(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers, step = raw["num_hidden_layers"], fields.need("interleave_moe_layer_step")
    count = fields.get("expert_count", 0)
    # A window of zero says that all layers see everything and turn; else every fourth layer does not turn.
    window = fields.get("attention.sliding_window", _CHUNK)
    if window not in (0, _CHUNK):
        raise fields.unsupported("attention.sliding_window")
    whole = window == 0
    mixed = [layer for layer in range(layers) if count and step and (layer + 1) % step == 0]
    counts = {"num_local_experts": count, "num_experts_per_tok": fields.need("expert_used_count")} if mixed else {}
    return {
        **counts,
        "intermediate_size": fields.need("expert_feed_forward_length") if mixed else raw["intermediate_size"],
        "intermediate_size_mlp": raw["intermediate_size"],
        "moe_layers": mixed,
        **({"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers} if whole else {}),
        "attn_temperature_tuning": not whole,
        "attention_chunk_size": _CHUNK,
        "use_qk_norm": count != 128,
        "attention_bias": biased(file),
    }


def _deepseek2(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    layers = raw["num_hidden_layers"] - fields.get("nextn_predict_layers", 0)
    # GLM-4.7-Flash's first files do not say how its router judges.
    flash = layers in (47, 48) and raw["vocab_size"] == 154_880
    gate = fields.get("expert_gating_func", 2 if flash else 1)
    if gate not in (1, 2):
        raise fields.unsupported("expert_gating_func")
    rotated, counts = fields.need("rope.dimension_count"), experts(fields)
    whole = fields.get("attention.key_length_mla") or fields.need("attention.key_length")
    groups, taken = fields.get("expert_group_count", 1), fields.get("expert_group_used_count", 1)
    softly = {"topk_method": "group_limited_greedy" if taken < groups else "greedy"} if gate == 1 else {}
    return {
        "model_type": "deepseek_v2" if gate == 1 else "deepseek_v3",
        "num_hidden_layers": layers,
        "kv_lora_rank": fields.need("attention.kv_lora_rank"),
        "q_lora_rank": fields.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": fields.get("attention.value_length_mla") or fields.need("attention.value_length"),
        "n_routed_experts": counts["num_experts"],
        "num_experts_per_tok": counts["num_experts_per_tok"],
        "n_shared_experts": fields.get("expert_shared_count", 0),
        "moe_intermediate_size": inner(fields, file),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.get("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", False),
        **({"n_group": groups, "topk_group": taken} if taken < groups or gate == 2 else {}),
        **softly,
    }


def _mixtral(fields: Fields, file: GGUFFile, raw: Raw) -> Raw:
    counts = experts(fields)
    return {"num_local_experts": counts["num_experts"], "num_experts_per_tok": counts["num_experts_per_tok"]}


_STATES = tuple(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"))
"""Keys that converters write of hybrids of which all layers attend, too."""
_AFTER = {"attention_norm": "post_attention_norm", "mlp_norm": "post_ffw_norm"}
ARCHITECTURES: dict[str, Architecture] = {
    **HYBRIDS,
    **GEMMA,
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", more=_gemma2),
    "phi3": Architecture("phi3", more=_phi3),
    "phi2": Architecture("phi", more=_phi2, parts={"mlp_norm": "attn_norm"}),
    "olmo2": Architecture("olmo2", more=_olmo2, parts=_AFTER),
    "smollm3": Architecture("smollm3", paired=True, more=_smollm3),
    "granite": Architecture("granite", paired=True, more=_granite, unread=_STATES),
    "exaone4": Architecture("exaone4", more=_exaone4, parts=_AFTER),
    "ernie4_5": Architecture("ernie4_5", paired=True, more=lambda fields, file, raw: {"use_bias": biased(file)}),
    "glm4": Architecture("glm4", paired=True, more=_glm4),
    "starcoder2": Architecture("starcoder2", more=_starcoder2),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", more=lambda fields, file, raw: {"attention_bias": biased(file)}),
    "mistral3": Architecture("mistral", paired=True, more=_mistral3, multiplied=True),
    "deepseek2": Architecture(
        "deepseek_v3",
        more=_deepseek2,
        parts={
            **{"q_down": "attn_q_a", "q_norm": "attn_q_a_norm", "q_up": "attn_q_b", "heads_up": "attn_kv_b"},
            **{"kv": "attn_kv_a_mqa", "k_norm": "attn_kv_a_norm"},
        },
        exact={"choice_bias": "exp_probs_b.bias"},
        multiplied=True,
        unread=("attention.value_length",),
    ),
    "llama4": Architecture("llama4_text", paired=True, more=_llama4, fixed={"expert_gating_func": 2}),
    "olmoe": Architecture("olmoe", more=_olmoe),
    "granitemoe": Architecture("granitemoeshared", paired=True, more=_granitemoe, unread=_STATES, fixed=NORMED),
    "qwen2moe": Architecture("qwen2_moe", more=_qwen2moe),
    "qwen3moe": Architecture("qwen3_moe", more=_qwen3moe, fixed=NORMED),
    "glm4moe": Architecture(
        "glm4_moe", more=_glm4moe, parts={"mlp_norm": "post_attention_norm"}, exact={"choice_bias": "exp_probs_b.bias"}
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        more=_gpt_oss,
        parts={"mlp_norm": "post_attention_norm"},
        exact={"router_bias": "ffn_gate_inp.bias"},
        # Weights are those of a softmax over the chosen experts.
        fixed=NORMED | {"expert_gating_func": 3},
    ),
    "seed_oss": Architecture("seed_oss", more=_seed, parts={"mlp_norm": "post_attention_norm"}),
}
"""By what files call them."""
MIXTRAL = Architecture("mixtral", paired=True, more=_mixtral, fixed=NORMED)
"""As files of Llama's architecture are read that have experts."""


def architecture_of(file: GGUFFile) -> Architecture | None:
    """How a file is read, None where it is not by this table."""
    named = file.metadata.get("general.architecture")
    if named == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES.get(named) if isinstance(named, str) else None


def _kv_heads(fields: Fields, heads: int) -> int:
    """Key-value heads of the layers that have some."""
    found = fields.get("attention.head_count_kv", heads)
    if isinstance(found, int):
        return found
    some = {int(each) for each in found if each}
    if len(some) != 1:
        raise fields.unsupported("attention.head_count_kv")
    return some.pop()


def _units(fields: Fields) -> int | None:
    """Inner units of an MLP, where all layers have as many."""
    found = fields.get("feed_forward_length", fields.get("expert_feed_forward_length"))
    return found if isinstance(found, int) else None


def architecture_config(own: Architecture, file: GGUFFile, fields: Fields, vocab_size: int) -> ModelConfig:
    """The configuration of such a file but for its rotation.

    Args:
        fields: Its metadata, whose names are those after the architecture's.
    """
    hidden, heads = fields.need("embedding_length"), fields.need("attention.head_count")
    raw: Raw = {
        "model_type": own.family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": fields.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if own.ropes else _kv_heads(fields, heads),
        "head_dim": fields.get("attention.key_length", max(hidden // heads, 1)),
        "intermediate_size": _units(fields),
        "max_position_embeddings": fields.need("context_length"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    more = {} if own.more is None else own.more(fields, file, raw)
    config = read_config(raw | more, fields.origin)
    if own.in_turns and config.delta is not None:
        return replace(config, delta=replace(config.delta, in_turns=True))
    return config
