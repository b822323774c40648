"""The experts of a head's layer: their tensors in a checkpoint, and what runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu

from decodery.models.config import ModelConfig
from decodery.models.families.tensor_names import tensor_name
from decodery.models.torch.mixture import Mixture
from decodery.models.torch.weights import Layer

from .checkpoint import Tensors

if TYPE_CHECKING:
    from .parts import LayerShape, Parts

_CHOICE = (
    *("experts", "experts_per_token", "normed_experts", "experts_scale", "sigmoid_router"),
    *("expert_groups", "taken_groups", "group_best"),
)
"""What of a model's configuration decides which experts a row takes, and how much of each."""
_FAMILY = "family"


def expert_settings(config: ModelConfig) -> dict[str, Any]:
    """How rows choose experts, as a head's settings hold it."""
    return {_FAMILY: config.family} | {name: getattr(config, name) for name in _CHOICE}


def expert_tensors(tensors: Tensors, prefix: str, name: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The router, the experts and the MLP that all rows take of a layer.

    Args:
        tensors: The checkpoint.
        prefix: How the layer's published names begin.
        name: How its names begin here.
        config: Of the layer, in its family's names.
    """
    count, inner, hidden = config.experts, config.intermediate_size, config.hidden_size

    def take(part: str, *shape: int) -> torch.Tensor:
        return tensors.take(_published(part, prefix, config), *shape)

    found = {f"{name}router.weight": take("router.weight", count, hidden)}
    if config.choice_bias:
        found[f"{name}choice_bias"] = take("choice_bias.weight", count)
    stacked = f"{prefix}mlp.experts."
    if f"{stacked}gate_up_proj" in tensors:
        gate_up = tensors.take(f"{stacked}gate_up_proj", count, 2 * inner, hidden)
        down = tensors.take(f"{stacked}down_proj", count, hidden, inner)
    else:
        gates = [take(f"experts.{each}.{half}.weight", inner, hidden) for each in range(count) for half in _OPENED]
        gate_up = torch.stack(gates)
        down = torch.stack([take(f"experts.{each}.down.weight", hidden, inner) for each in range(count)])
    found[f"{name}experts_gate_up.weight"] = gate_up.reshape(-1, hidden)
    found[f"{name}experts_down.weight"] = down.reshape(-1, inner)
    if config.shared_inner:
        halves = [take(f"shared_{half}.weight", config.shared_inner, hidden) for half in _OPENED]
        found[f"{name}shared_gate_up.weight"] = torch.cat(halves)
        found[f"{name}shared_down.weight"] = take("shared_down.weight", hidden, config.shared_inner)
    if config.shared_gate:
        found[f"{name}shared_router.weight"] = take("shared_router.weight", 1, hidden)
    return found


_OPENED = ("gate", "up")
_SINGLE = {
    "ffn_gate_inp.weight": "router.weight",
    "exp_probs_b.bias": "choice_bias.weight",
    "ffn_gate_inp_shexp.weight": "shared_router.weight",
    **{f"ffn_{half}_shexp.weight": f"shared_{half}.weight" for half in (*_OPENED, "down")},
}
"""Tensors of a GGUF file's block with experts."""


def folder_experts(
    read: dict[str, torch.Tensor], block: str, prefix: str, config: ModelConfig
) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file's block under the names of folders.

    Args:
        read: By name; those that are not of experts stay as they are.
        block: How the file's names of the block begin.
        prefix: How the layer's names begin in folders.
        config: Of the model.
    """
    known = {f"{block}{theirs}": ours for theirs, ours in _SINGLE.items() if f"{block}{theirs}" in read}
    named = {theirs: _published(ours, prefix, config) for theirs, ours in known.items()}
    found = {named.get(name, name): each for name, each in read.items()}
    if (router := named.get(f"{block}ffn_gate_inp_shexp.weight")) is not None:
        found[router] = found[router].reshape(1, -1)
    halves = [found.pop(f"{block}ffn_{half}_exps.weight", None) for half in (*_OPENED, "down")]
    stacked = [each.reshape(config.experts, -1, each.shape[-1]) for each in halves if each is not None]
    if len(stacked) == len(halves):
        gate, up, down = stacked
        found |= {f"{prefix}mlp.experts.gate_up_proj": torch.cat((gate, up), dim=1)}
        found |= {f"{prefix}mlp.experts.down_proj": down}
    return found


def _published(part: str, prefix: str, config: ModelConfig) -> str:
    """What the family calls a part of the layer whose names begin with `prefix`."""
    return prefix + tensor_name(f"layers.0.{part}", config).split(".layers.0.")[1]


def mixture(parts: Parts, prefix: str, shape: LayerShape, settings: Mapping[str, Any]) -> Mixture:
    """What runs the experts of a head's layer.

    Args:
        parts: The head's tensors.
        prefix: How the names of the layer's begin.
        shape: Of the layer, whose inner units are those of an expert.
        settings: See `expert_settings`.
    """
    config = ModelConfig(
        vocab_size=1, hidden_size=shape.hidden, intermediate_size=shape.inner, num_layers=1, num_heads=shape.heads,
        num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, max_positions=1, **settings,
    )  # fmt: skip
    shared = f"{prefix}shared_gate_up.weight" in parts
    norm = parts[f"{prefix}mlp_norm.weight"]
    layer = Layer(
        norm, parts.linear(f"{prefix}qkv"), parts.linear(f"{prefix}output"), norm,
        parts.linear(f"{prefix}experts_gate_up"), parts.linear(f"{prefix}experts_down"),
        router=parts[f"{prefix}router.weight"], choice_bias=parts.tensors.get(f"{prefix}choice_bias"),
        shared_gate_up=parts.linear(f"{prefix}shared_gate_up") if shared else None,
        shared_down=parts.linear(f"{prefix}shared_down") if shared else None,
        shared_router=parts.tensors.get(f"{prefix}shared_router.weight"),
    )  # fmt: skip
    return Mixture(layer, config, silu)
