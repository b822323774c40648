"""Parts of packed layers: some of their inputs, as processes that share a model have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from decodery.core.errors import UnsupportedModel

from ..native.packed import SUPER
from .packed_linear import PackedLinear


def some_inputs(layer: PackedLinear, first: int, last: int) -> PackedLinear:
    """The layer over inputs first to last alone, without its bias: what it adds up of them.

    Args:
        layer: The layer.
        first, last: They begin and end with groups.

    Raises:
        UnsupportedModel: If they do not, or if the columns of the layer are in another order than its inputs.
    """
    if layer.order is not None:
        raise UnsupportedModel(
            "weights in act-order are not shared out by their inputs: choose dtype bfloat16 (float32 on "
            "a CPU), or a file without it"
        )
    _, inputs = layer.shape
    if layer.group >= inputs:
        # All inputs share a step, and so do some of them.
        parts: dict[str, Any] = {"group": last - first}
    elif first % layer.group or last % layer.group:
        raise UnsupportedModel(
            f"weights that share a step by {layer.group} inputs are not cut at {first} to {last}: share the model out "
            "among fewer processes, or choose dtype bfloat16 (float32 on a CPU)"
        )
    else:
        layer = layer if first % SUPER == last % SUPER == 0 else _without_supers(layer)
        groups, supers = (slice(first // size, last // size) for size in (layer.group, SUPER))
        cuts = {"steps": groups, "leasts": groups, "supers": supers, "least_supers": supers}
        known = {name: getattr(layer, name) for name in cuts}
        parts = {name: part[:, cuts[name]].contiguous() for name, part in known.items() if part is not None}
    return replace(layer, codes=_codes(layer, first, last), bias=None, **parts)


def _codes(layer: PackedLinear, first: int, last: int) -> torch.Tensor:
    """Codes of some inputs: of more than four bits the upper ones lie after the lower ones of all inputs."""
    if layer.bits == 8:
        return layer.codes[:, first:last].contiguous()
    more, upper = layer.bits - 4, layer.shape[1] // 2
    low = layer.codes[:, first // 2 : last // 2]
    high = layer.codes[:, upper + first * more // 8 : upper + last * more // 8]
    return torch.cat((low, high), dim=1)


def _without_supers(layer: PackedLinear) -> PackedLinear:
    """The same numbers with float32 steps, where a cut goes through inputs that share more than a step."""

    def whole(values: torch.Tensor | None, supers: torch.Tensor | None) -> torch.Tensor | None:
        if values is None or supers is None:
            return values
        of = torch.arange(values.shape[1], device=values.device) * layer.group // SUPER
        return values.float() * supers.float()[:, of]

    steps, leasts = whole(layer.steps, layer.supers), whole(layer.leasts, layer.least_supers)
    return replace(layer, steps=steps, supers=None, leasts=leasts, least_supers=None)
