"""MLPs that are many: a router chooses a few experts for every row (Mixtral, Qwen, DeepSeek, GLM, gpt-oss)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..config import CLAMPED, ModelConfig
from ..loaders.in_place import InPlace, in_place
from ..native.block_linear import BlockLinear
from ..native.floats import Float4Linear, Float8Linear, MXFP4Linear, NF4Linear
from ..native.int4 import Int4Linear
from ..native.int8 import Int8Linear
from ..native.super_blocks import SuperBlockLinear
from .packed_linear import PackedLinear
from .weights import Dense, Layer, Linear, Weights

_ALPHA, _LIMIT = 1.702, 7.0
_NOTHING = {"lfm2_moe": 1e-6}
"""Added to the sum of weights, which may all be 0 where each expert is judged by itself; 1e-20 in other families."""


class Sharing(Protocol):
    """Which experts the rows of one segment may take, decided per layer from all of their choices."""

    def core(self, said: torch.Tensor, taken: int) -> torch.Tensor:
        """[experts] bool.

        Args:
            said: [n, experts] how likely the router finds each.
            taken: By a row, and kept at least.
        """
        ...


class Shared(NamedTuple):
    """A way of sharing, and where the rows of each segment of a pass begin, with the end of the last."""

    way: Sharing
    offsets: Sequence[int]


class Mixture:
    """The experts of one layer, as views into its stacked matrices.

    Args:
        activation: Of the gates.
        floor: The share of its most likely expert's weight below which a row does without another one.
    """

    def __init__(
        self,
        layer: Layer,
        config: ModelConfig,
        activation: Callable[[torch.Tensor], torch.Tensor],
        floor: float = 0.0,
    ) -> None:
        assert layer.router is not None
        self._floor = floor
        self._made: dict[int, tuple[Linear, Linear]] = {}
        self._config, self._router, self._activation, self._layer = config, layer.router, activation, layer

    def __call__(
        self, rows: torch.Tensor, shared: Shared | None = None, routed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the experts add to normed rows [N, hidden], and which ones each row took [N, experts_per_token].

        shared: what experts the rows of a segment may take; at least as many as a row takes.
        routed: what the router reads, None for the rows.
        """
        config = self._config
        # In float64, so that no row's choice hangs on the rows beside it.
        logits = (rows if routed is None else routed).double() @ self._router.double().T
        if self._layer.router_bias is not None:
            logits = logits + self._layer.router_bias.double()
        said = logits.sigmoid() if config.sigmoid_router else logits.softmax(dim=-1)
        free = said if self._layer.choice_bias is None else said + self._layer.choice_bias.double()
        if config.expert_groups:
            free = self._grouped(free)
        if shared is not None:
            free = within(free, shared, config.experts_per_token)
        best, chosen = free.topk(config.experts_per_token, dim=-1)
        weights = best if free is said else said.gather(1, chosen)
        if self._floor:
            # What a row does without counts as its first expert once more, of weight 0.
            left_out = weights < self._floor * weights[:, :1]
            left_out[:, 0] = False
            weights, chosen = weights.masked_fill(left_out, 0.0), torch.where(left_out, chosen[:, :1], chosen)
        if config.summed_experts:
            chosen, weights = chosen.sort(dim=-1).values, torch.ones_like(weights)
        elif config.normed_experts:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + nothing(config))
        if self._layer.expert_scales is not None:
            weights = weights * self._layer.expert_scales[chosen]
        weights = (weights * config.experts_scale).to(rows.dtype)
        found = torch.zeros(*chosen.shape, rows.shape[1], dtype=rows.dtype, device=rows.device)
        for number in chosen.unique().tolist():
            row, place = torch.where((chosen == number) & (weights != 0) if self._floor else chosen == number)
            gate_up, down = self._expert(number)
            share = weights[row, place, None]
            made = down(self._opened(gate_up(rows[row] * share if config.scaled_inputs else rows[row])))
            found[row, place] = made if config.scaled_inputs else made * share
        # One after the other, the most likely first, or in their own order where they are summed: a row's sum is the
        # same whatever else is in the pass.
        total = found[:, 0]
        for each in range(1, found.shape[1]):
            total = total + found[:, each]
        if self._layer.shared_gate_up is not None and self._layer.shared_down is not None and not config.experts_beside:
            opened = self._layer.shared_gate_up(rows)
            if config.gated:
                gate, up = opened.chunk(2, dim=-1)
                more = self._layer.shared_down(self._activation(gate) * up)
            else:
                more = self._layer.shared_down(self._activation(opened))
            if self._layer.shared_router is not None:
                # In float64, as the router.
                share = (rows.double() @ self._layer.shared_router.double().T).sigmoid()
                more = more * share.to(more.dtype)
            total = total + more
        return total, chosen

    def _opened(self, found: torch.Tensor) -> torch.Tensor:
        """What an expert's second matrix reads of what its first one gives."""
        return self._gated(*found.chunk(2, dim=-1)) if self._config.gated else self._activation(found)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self._config.activation != CLAMPED:
            return self._activation(gate) * up
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return (up + 1.0) * (self._activation(gate * _ALPHA) / _ALPHA)

    def _grouped(self, free: torch.Tensor) -> torch.Tensor:
        """Scores [n, experts] of the best groups, -inf of the others."""
        groups = free.unflatten(1, (self._config.expert_groups, -1))
        best = (
            groups.topk(self._config.group_best, dim=-1)
            .values.sum(dim=-1)
            .topk(self._config.taken_groups, dim=-1)
            .indices
        )
        left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=free.device).scatter_(1, best, False)
        return groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)

    def _expert(self, number: int) -> tuple[Linear, Linear]:
        if number in self._made:
            return self._made[number]
        inner, hidden = (1 + self._config.gated) * self._config.intermediate_size, self._config.hidden_size
        made = rows_of(self._layer.gate_up, number * inner, inner), rows_of(self._layer.down, number * hidden, hidden)
        if not isinstance(made[0], Dense):
            # The kernels lay an expert out when it is first taken, and once. What can be trained is cut each time: a
            # view from before training began would not be part of what is learned.
            self._made[number] = made
        return made


def nothing(config: ModelConfig) -> float:
    """What is added to the sum of weights that are normed."""
    return _NOTHING.get(config.family, 1e-20)


def within(said: torch.Tensor, shared: Shared, taken: int) -> torch.Tensor:
    """What the router says [n, experts] of the experts that each segment shares, and -inf of the others.

    Args:
        taken: By a row.
    """
    free = torch.full_like(said, -torch.inf)
    for first, end in zip(shared.offsets, shared.offsets[1:], strict=False):
        core = shared.way.core(said[first:end], taken)
        free[first:end, core] = said[first:end, core]
    return free


def mixtures(
    weights: Weights, config: ModelConfig, activation: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, Mixture]:
    """Of the layers that have experts, by number."""
    mixed = (index for index in range(config.num_layers) if config.mixes(index))
    return {index: Mixture(weights.layers[index], config, activation, config.floor(index)) for index in mixed}


def rows_of(stacked: Linear, first: int, count: int) -> Linear:
    """Some outputs of a layer, as a layer that shares its memory."""
    span = slice(first, first + count)
    whole: torch.Tensor | None = stacked.bias  # type: ignore[attr-defined]
    bias = None if whole is None else whole[span]
    if isinstance(stacked, InPlace):
        return in_place(stacked.rows.some(first, count), bias)
    if isinstance(stacked, PackedLinear):
        return stacked.some(span)
    if isinstance(stacked, Int4Linear):
        return Int4Linear(stacked.weight[span], stacked.step[span], stacked.least[span], bias)
    if isinstance(stacked, BlockLinear):
        return BlockLinear(stacked.weight[span], stacked.scales[span], bias)
    if isinstance(stacked, SuperBlockLinear):
        return SuperBlockLinear(stacked.form, stacked.weight[span], stacked.scales[span], stacked.integers[span], bias)
    if isinstance(stacked, Float4Linear):
        return Float4Linear(stacked.weight[span], stacked.half_steps[span], stacked.scale[span], bias)
    if isinstance(stacked, MXFP4Linear):
        return MXFP4Linear(stacked.weight[span], stacked.exponents[span], bias)
    if isinstance(stacked, Float8Linear):
        return Float8Linear(stacked.weight[span], stacked.group_scales[span], bias)
    if isinstance(stacked, NF4Linear):
        return NF4Linear(stacked.weight[span], stacked.code_scales[span], bias)
    if isinstance(stacked, Int8Linear):
        return Int8Linear(stacked.weight[span], stacked.scale[span], bias)
    assert isinstance(stacked, Dense)
    return Dense(stacked.weight[span], bias)
