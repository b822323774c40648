"""Checkpoints that keep rows in another order than this package runs them: several parts in one tensor, other pairs.

Rotation here turns dimension i of a head together with i + head_dim / 2. Families that turn fewer dimensions, or
neighbours, become that by an order of the rows of queries and keys in every head; products of the two stay what they
are. Pairs that are not turned at all have frequency zero.
"""

from __future__ import annotations

import torch

from ..config import ModelConfig
from ..torch import latent
from ..torch.rope import head_order
from .gated_rows import GATED, gated_rows
from .layouts import LAYERS_OF

_QKV = dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj")
_GATE_UP = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
FUSED: dict[str, dict[str, str]] = {
    "phi3": _QKV | _GATE_UP,
    **dict.fromkeys(("glm", "glm4"), _GATE_UP),
    "ernie4_5": {},
    "glm4_moe": {},
    "llada2_moe": dict.fromkeys(("q", "k", "v"), "attention.query_key_value"),
    "phi": {},
    "stablelm": {},
    "gpt_neox": {name: LAYERS_OF["gpt_neox"][name] for name in "qkv"},
    "bamba": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "llama4_text": {},
    "gpt2": {name: LAYERS_OF["gpt2"][name] for name in "qkv"},
    **{family: {} for family in GATED},
    **{family: {} for family in ("mamba", "falcon_mamba", "jamba")},
    "granitemoehybrid": dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), "shared_mlp.input_linear"),
    "granitemoeshared": dict.fromkeys(("shared_gate", "shared_up"), "shared_mlp.input_linear"),
}
"""By family and part of a layer, the tensor that holds it together with others."""
_PAIRED = ("glm", "glm4", "ernie4_5", "llama4_text")
"""Families that turn neighbours together."""
ARRANGED = tuple(FUSED)
"""Families whose tensors are taken row by row."""


def rows(part: str, config: ModelConfig) -> torch.Tensor | None:
    """[n] int64, which rows of its tensor a part such as "layers.3.q.weight" is.

    None: all of them, in their order.
    """
    names = part.split(".")
    if config.family not in ARRANGED or names[0] != "layers":
        return None
    if config.latent is not None:
        return latent.rows(names[2], config)
    if names[2] in ("q_norm", "k_norm") and config.rope.kind != "none":
        # Of one head, whose dimensions stand in another order.
        return _order(config)
    if config.gated_attention and (found := gated_rows(names[2], config, _order(config))) is not None:
        return found
    if (states := config.selective) is not None and names[2] == "qkv":
        # Checkpoints have the rows before their gates.
        return torch.arange(2 * states.inner, device="cpu").roll(-states.inner)
    name, dim, inner = names[2], config.head_dim, config.intermediate_size
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    fused = name in FUSED[config.family]
    sizes = {
        "q": (0, queries),
        "k": (queries, keys),
        "v": (queries + keys, keys),
        "gate": (0, inner),
        "up": (inner,) * 2,
        "shared_gate": (0, config.shared_inner),
        "shared_up": (config.shared_inner,) * 2,
    }
    if name not in sizes or (not fused and name not in ("q", "k")):
        return None
    first, count = sizes[name]
    found = torch.arange(count, device="cpu")
    if config.family == "gpt_neox" and fused:
        # Queries, keys and values of one head stand side by side.
        first = 0
        found = (
            found.view(-1, dim)
            + 2 * dim * torch.arange(config.num_heads, device="cpu")[:, None]
            + "qkv".index(name) * dim
        ).flatten()
    if name in ("q", "k") and config.rope.kind != "none":
        found = (found.view(-1, dim)[:, _order(config)]).flatten()
    return found + first if fused else found


def _order(config: ModelConfig) -> torch.Tensor:
    """[head_dim] the dimension of a checkpoint's head that stands at each place here."""
    return head_order(config.head_dim, config.rope.rotated or config.head_dim, paired=config.family in _PAIRED)
