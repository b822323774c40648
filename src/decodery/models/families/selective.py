"""Checkpoints with Mamba-1 layers, as a table: Mamba, Falcon-Mamba and Jamba."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import EPS, EXPERTS, HEAD_DIM, KERNEL, MOST_LAYERS, WIDTH, Rope, Selective
from ..loaders.fields import Anything, Either, Fields, Flag, Kind, Number, Text, Whole
from .family import Family, Raw, silu_alone

_ENDLESS = 1 << 20
"""Positions of a model that has none; no state grows with them."""


@dataclass(frozen=True)
class _Names:
    """What configurations call the sizes of the layers."""

    state: str
    kernel: str
    expand: str
    rank: str


_PURE = _Names("state_size", "conv_kernel", "expand", "time_step_rank")
_JAMBA = _Names("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank")


def _states(fields: Fields, names: _Names, eps: float | None = None, *, weighted: bool = False) -> Selective:
    hidden = fields.need("hidden_size")
    inner, rank = int(fields.get(names.expand, 2) * hidden), fields.get(names.rank, "auto")
    if names == _PURE:
        # What is written counts, as there is no MLP.
        inner = fields.get("intermediate_size", inner)
    rank = -(-hidden // 16) if rank == "auto" else rank
    WIDTH.check(inner, f"{fields.origin}: {names.expand} * hidden_size")
    WIDTH.check(rank, f"{fields.origin}: {names.rank}")
    state, kernel = fields.get(names.state, 16), fields.get(names.kernel, 4)
    return Selective(inner, 1, 1, state, kernel, rank=rank, step_eps=eps, weighted=weighted)


def _wanted(fields: Fields, **values: bool) -> None:
    for name, wanted in values.items():
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)


def _pure(fields: Fields, raw: Raw, states: Selective) -> Raw:
    _wanted(fields, use_bias=False, use_conv_bias=True)
    silu_alone(fields, raw)
    layers, hidden = fields.need("num_hidden_layers"), fields.need("hidden_size")
    # What older files repeat in other words.
    repeated = {"d_inner": states.inner, "d_model": hidden, "n_layer": layers}
    for name, wanted in repeated.items():
        if fields.get(name, wanted) != wanted:
            raise CorruptFile(f"{fields.origin}: {name} is {fields.get(name)}, and the other fields say {wanted}")
    # A cache of this shape has room for what is kept of a row.
    room = -(-states.width // 4) * 2
    if room > HEAD_DIM.most:
        raise UnsupportedModel(f"{fields.origin}: {states.inner} channels are more than there is room for")
    raw |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": room, "intermediate_size": 1}
    raw["max_position_embeddings"] = _ENDLESS
    return {
        "selective": states,
        "state_layers": (True,) * layers,
        "intermediate_size": 0,
        "rope": Rope(kind="none"),
    }


def _mamba(fields: Fields, raw: Raw) -> Raw:
    return _pure(fields, raw, _states(fields, _PURE))


def _falcon_mamba(fields: Fields, raw: Raw) -> Raw:
    return _pure(fields, raw, _states(fields, _PURE, fields.get("mixer_rms_eps", 1e-6)))


def _jamba(fields: Fields, raw: Raw) -> Raw:
    _wanted(fields, mamba_proj_bias=False, mamba_conv_bias=True)
    layers, experts = fields.need("num_hidden_layers"), fields.get("num_experts", fields.get("num_local_experts", 16))
    period, first = fields.get("attn_layer_period", 8), fields.get("attn_layer_offset", 4)
    recurrent = tuple(layer % period != first for layer in range(layers))
    own: Raw = {"rope": Rope(kind="none")}
    if any(recurrent):
        silu_alone(fields, raw)
        eps = raw.get("rms_norm_eps", 1e-6)
        EPS.check(eps, f"{fields.origin}: rms_norm_eps")
        states = _states(fields, _JAMBA, float(eps), weighted=True)
        own |= {"selective": states, "state_layers": recurrent}
    period, first = fields.get("expert_layer_period", 2), fields.get("expert_layer_offset", 1)
    dense = tuple(layer % period != first for layer in range(layers))
    if experts <= 1 or all(dense):
        return own
    taken, inner = fields.get("num_experts_per_tok", 2), fields.need("intermediate_size")
    own |= {"experts": experts, "experts_per_token": taken, "normed_experts": False}
    return own | ({"dense_layers": dense, "dense_inner": inner} if any(dense) else {})


_SIZES: dict[str, Kind] = {
    **dict.fromkeys((_PURE.state, _JAMBA.state), HEAD_DIM),
    **dict.fromkeys((_PURE.kernel, _JAMBA.kernel), KERNEL),
    **dict.fromkeys((_PURE.expand, _JAMBA.expand), Number(0.01, 1024.0)),
    **dict.fromkeys((_PURE.rank, _JAMBA.rank), Either(WIDTH, Text(64))),
    # How the scan is computed.
    **dict.fromkeys(("use_mambapy", "use_associative_scan"), Flag()),
}
_OF_PURE: dict[str, Kind] = {
    **_SIZES,
    **dict.fromkeys(("use_bias", "use_conv_bias"), Flag()),
    **dict.fromkeys(("intermediate_size", "d_inner", "d_model", "n_layer"), WIDTH),
    "layer_norm_epsilon": EPS,
    # How weights were drawn, and what is stored of tokens that are none.
    **dict.fromkeys(("time_step_scale", "time_step_init_scheme", "fused_add_norm", "pad_vocab_size_multiple",
                     "ssm_cfg"), Anything()),
}  # fmt: skip
_MIXER = {
    "qkv": "in_proj.weight",
    "output": "out_proj.weight",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "select_in": "x_proj.weight",
    "select_out": "dt_proj.weight",
    "step_bias": "dt_proj.bias",
    "decay": "A_log",
    "skip": "D",
    **{f"{part}_norm": f"{part}_layernorm.weight" for part in ("dt", "b", "c")},
}
_BACKBONE = {
    "names": {"layer_norm_epsilon": "rms_norm_eps"},
    "parts": {"attention_norm": "norm"},
    "recurrent": {part: f"mixer.{name}" for part, name in _MIXER.items()},
    "whole": {"embedding": "backbone.embeddings", "norm": "backbone.norm_f"},
    "layers": "backbone.layers",
}
_HALVES = ("gate", "up", "down")
SELECTIVE: dict[str, Family] = {
    "mamba": Family(fields=_OF_PURE, derived=_mamba, **_BACKBONE),  # type: ignore[arg-type]
    "falcon_mamba": Family(
        fields={**_OF_PURE, "mixer_rms_eps": EPS},
        derived=_falcon_mamba,
        **_BACKBONE,  # type: ignore[arg-type]
    ),
    "jamba": Family(
        fields={
            **_SIZES,
            **dict.fromkeys(("mamba_proj_bias", "mamba_conv_bias"), Flag()),
            **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), EXPERTS),
            **dict.fromkeys(("attn_layer_period", "expert_layer_period"), Whole(1, MOST_LAYERS)),
            **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), Whole(0, MOST_LAYERS)),
            "intermediate_size": WIDTH,
        },
        derived=_jamba,
        parts={
            "mlp_norm": "pre_ff_layernorm",
            "router": "feed_forward.router",
            **{half: f"feed_forward.{half}_proj" for half in _HALVES},
        },
        experts={half: f"feed_forward.experts.{{}}.{half}_proj" for half in _HALVES},
        recurrent={part: f"mamba.{name}" for part, name in _MIXER.items()},
        whole={"norm": "model.final_layernorm"},
    ),
}
