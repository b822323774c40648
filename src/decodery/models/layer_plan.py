"""Which way rows take through a model: where they enter and leave, and which sublayers they pass by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from decodery.core.errors import SettingsError

from .torch.mixture import Sharing

SUBLAYERS = ("attention", "mlp")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The layers that rows are run through, in order; None: all of them.

    A route that begins after the first layer takes hidden states for rows (`Segment.states`), one that ends before the
    last one leaves early: its logits are what the head makes of the states there.

    Attributes:
        layers: Numbers of the layers, None for all.
        skip: Sublayers that rows pass by, such as "attention.3" or "mlp.5". Rows that pass by a layer's attention leave
            no keys and values in it.
        abreast: So many layers at a time read the same rows: the attention of all layers of a group looks at what
            enters the group, and what each finds is added to the rows right before its own MLP. The first and the last
            layer are groups of their own.
        experts: Which ones of a mixture the rows of a segment may take together, None for each row's own choice.
    """

    layers: tuple[int, ...] | None = None
    skip: frozenset[str] = frozenset()
    abreast: int = 1
    experts: Sharing | None = None


WHOLE = LayerPlan()
"""Through all layers, nothing skipped."""


class LayerStep(NamedTuple):
    """One layer of a route, and which of its sublayers are run."""

    layer: int
    attention: bool = True
    mlp: bool = True


@functools.lru_cache(maxsize=1024)
def layer_steps(layer_plan: LayerPlan, layers: int) -> tuple[LayerStep, ...]:
    """The layers of a route through a model that has so many.

    Raises:
        SettingsError: For what the model does not have.
    """
    run = tuple(range(layers)) if layer_plan.layers is None else layer_plan.layers
    if any(not 0 <= layer < layers for layer in run) or list(run) != sorted(set(run)):
        raise SettingsError(f"a route names layers from 0 to {layers - 1} in ascending order, not {list(run)}")
    skipped = {_sublayer(name, layers) for name in layer_plan.skip}
    return tuple(LayerStep(layer, *((name, layer) not in skipped for name in SUBLAYERS)) for layer in run)


@functools.lru_cache(maxsize=1024)
def groups(layer_plan: LayerPlan, layers: int) -> tuple[tuple[LayerStep, ...], ...]:
    """The layers of a route as they are run, `abreast` at a time."""
    run, size = layer_steps(layer_plan, layers), layer_plan.abreast
    if size < 1:
        raise SettingsError(f"a route takes at least one layer at a time, not {size}")
    inner = run[1:-1]
    return tuple(filter(None, (run[:1], *(inner[i : i + size] for i in range(0, len(inner), size)), run[1:][-1:])))


def abreast(
    rows: torch.Tensor,
    groups: Sequence[Sequence[LayerStep]],
    through: Callable[[torch.Tensor, Sequence[LayerStep]], torch.Tensor],
) -> torch.Tensor:
    """Rows [N, hidden] after groups of layers, of which each attends to what enters its group.

    Args:
        through: Rows after some stops, one after the other.
    """
    for group in groups:
        attended = [through(rows, [stop._replace(mlp=False)]) for stop in group]
        entered = rows
        for place, (stop, found) in enumerate(zip(group, attended, strict=True)):
            # The first layer of a group has all that it has elsewhere, to the last bit.
            rows = rows + (found - entered) if place else found
            rows = through(rows, [stop._replace(attention=False)])
    return rows


@functools.lru_cache(maxsize=1024)
def attending(layer_plan: LayerPlan, layers: int) -> tuple[int, ...]:
    """The layers whose attention is run, which are those that are given the rows' keys and values."""
    return tuple(stop.layer for stop in layer_steps(layer_plan, layers) if stop.attention)


@functools.lru_cache(maxsize=1024)
def sublayers(layer_plan: LayerPlan, layers: int) -> int:
    """How many sublayers rows go through."""
    return sum(stop.attention + stop.mlp for stop in layer_steps(layer_plan, layers))


def _sublayer(name: str, layers: int) -> tuple[str, int]:
    kind, _, layer = name.partition(".")
    if kind not in SUBLAYERS or not layer.isdecimal() or int(layer) >= layers:
        raise SettingsError(f"a model of {layers} layers can skip attention.0 to mlp.{layers - 1}, not {name!r}")
    return kind, int(layer)
