"""Gated DeltaNet's states: Gated Delta Networks: Improving Mamba2 with Delta Rule (2024), as Qwen3-Next has them.

The state S of one head, [state, head_dim], forgets and then takes what it has for a key k towards a value v:
S' = exp(g) S + k u with u = beta (v - k exp(g) S), and a row says q S'. Keys and queries have length 1 but for the root
of their size, and g = -exp(a) softplus(t) < 0 and 0 < beta < 1 come from the row.

For rows of a tree all u are found at once: with G the sum of g along a path, u_i = beta_i (v_i - exp(G_i) k_i S -
sum over rows j before i on its path of exp(G_i - G_j) (k_i k_j) u_j) is a triangular system, as a row stands after
those that it sees.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm, silu, softplus

from ..config import ModelConfig
from .weights import Layer

_EPS = 1e-6
"""Added to the squares of keys and queries before their root."""


class DeltaRule:
    """See `recurrence.StateRule`.

    Attributes:
        tensors: What a `NativeScan` reads after the convolution.
    """

    def __init__(self, layer: Layer, config: ModelConfig, dtype: torch.dtype) -> None:
        assert config.delta is not None and layer.decay is not None
        assert layer.step_bias is not None and layer.gate_norm is not None
        self._shape, self._eps = config.delta, config.norm_eps
        self._step_bias, self._gate_norm = layer.step_bias.to(dtype), layer.gate_norm.to(dtype)
        self._decay = -layer.decay.to(dtype).exp()
        self.tensors = self._step_bias, self._decay, None, self._gate_norm
        sizes = config.delta.heads, config.delta.state, config.delta.head_dim
        self.nothing = torch.zeros(sizes, dtype=dtype, device=layer.decay.device)

    def scan(
        self, mixed: torch.Tensor, raw: torch.Tensor, seen: torch.Tensor, count: int, state: torch.Tensor
    ) -> torch.Tensor:
        """See `StateRule.scan`."""
        queries, keys, values, passed, written = self._parts(mixed, raw)
        between, since = _passed(passed, seen)
        added = self._added(keys, values, written, between, since, state)
        alike = torch.einsum("nhs,ths->hnt", queries[-count:], keys) * between[:, -count:]
        told = torch.einsum("nhs,hsp->hnp", queries[-count:], state) * since[:, -count:, None]
        return (told + alike @ added).transpose(0, 1).flatten(1)

    def advance(self, mixed: torch.Tensor, raw: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule.advance`."""
        _, keys, values, passed, written = self._parts(mixed, raw)
        seen = torch.ones(len(mixed), len(mixed), dtype=torch.bool, device=mixed.device).tril()
        between, since = _passed(passed, seen)
        added = self._added(keys, values, written, between, since, state)
        return state * since[:, -1, None, None] + torch.einsum("ths,ht,htp->hsp", keys, between[:, -1], added)

    def gated(self, said: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `StateRule.gated`."""
        heads = said.unflatten(1, (self._shape.heads, -1))
        return rms_norm(heads, heads.shape[-1:], self._gate_norm, self._eps).flatten(1) * silu(gate)

    def _added(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        written: torch.Tensor,
        between: torch.Tensor,
        since: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """u of all rows, [heads, T, head_dim]; see `_parts` and `_passed`."""
        beta = written.T[..., None]
        told = torch.einsum("ths,hsp->htp", keys, state) * since[..., None]
        alike = torch.einsum("nhs,ths->hnt", keys, keys) * between
        system = (alike * beta).tril(-1)
        wanted = beta * (values.transpose(0, 1) - told)
        return torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)

    def _parts(
        self, mixed: torch.Tensor, raw: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads, state], values [T, heads, head_dim], g and beta [T, heads]."""
        shape = self._shape
        size = shape.groups * shape.state
        queries, keys, values = mixed.split((size, size, shape.inner), dim=1)
        several = shape.heads // shape.groups
        queries, keys = (_unit(each.unflatten(1, (shape.groups, -1))) for each in (queries, keys))
        if shape.in_turns:
            queries, keys = queries.repeat(1, several, 1), keys.repeat(1, several, 1)
        else:
            queries, keys = queries.repeat_interleave(several, dim=1), keys.repeat_interleave(several, dim=1)
        written, steps = raw.chunk(2, dim=1)
        passed = self._decay * softplus(steps + self._step_bias)
        return queries * shape.state**-0.5, keys, values.unflatten(1, (shape.heads, -1)), passed, written.sigmoid()


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * ((rows * rows).sum(-1, keepdim=True) + _EPS).rsqrt()


def _passed(passed: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left at each row of one that it sees, [heads, T, T], 0 of others, and of what came before, [heads, T].

    Args:
        passed: [T, heads] <= 0.
        seen: [T, T] bool.
    """
    along = torch.where(seen, passed.T[:, None], 0.0)
    # Between row j and the one that looks back at it: 0 or less, so nothing overflows.
    between = (along.flip(2).cumsum(2).flip(2) - along).clamp(max=0.0)
    return between.masked_fill(~seen, -torch.inf).exp(), along.sum(2).exp()
