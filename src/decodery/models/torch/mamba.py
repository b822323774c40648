"""Mamba-2's states: Transformers are SSMs (2024).

The state h of one head, [head_dim, state], goes on as h' = exp(t a) h + t x b, and a row says c h' + d x, where t, x, b
and c come from the row and those right before it, and a < 0 belongs to the head.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm, silu, softplus

from ..config import ModelConfig
from .weights import Layer

_AT_ONCE = 64
"""Rows whose outputs are computed together."""


def tree_scan(
    steps: torch.Tensor,
    decay: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    seen: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Outputs of the last n of T rows, each after `state` and the rows it sees, itself included.

    Args:
        steps: [T, heads] > 0.
        decay: [heads] < 0.
        x: [T, heads, head_dim].
        b: [T, groups, size].
        c: [n, groups, size].
        seen: [n, T] bool.
        state: [heads, head_dim, size] before the first row.

    Returns:
        [n, heads, head_dim].
    """
    heads, groups = steps.shape[1], b.shape[1]
    passed = torch.where(seen[..., None], (steps * decay)[None], 0.0)
    # What lies between row j and the one that looks back at it: 0 or less, so nothing overflows.
    between = passed.flip(1).cumsum(1).flip(1) - passed
    weights = between.clamp(max=0.0).masked_fill(~seen[..., None], -torch.inf).exp() * steps[None]
    alike = torch.einsum("ngs,tgs->ntg", c, b).repeat_interleave(heads // groups, dim=2)
    own = torch.einsum("nth,thp->nhp", weights * alike, x)
    told = torch.einsum("nhs,hps->nhp", c.repeat_interleave(heads // groups, dim=1), state)
    return own + passed.sum(1).exp()[..., None] * told


def advance(
    steps: torch.Tensor, decay: torch.Tensor, x: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The state [heads, head_dim, size] after a chain of rows; see `tree_scan`."""
    passed = steps * decay
    between = passed.flip(0).cumsum(0).flip(0) - passed
    weighted = x * (between.clamp(max=0.0).exp() * steps)[..., None]
    added = torch.einsum("thp,ths->hps", weighted, b.repeat_interleave(steps.shape[1] // b.shape[1], dim=1))
    return passed.sum(0).exp()[:, None, None] * state + added


class MambaRule:
    """See `recurrence.StateRule`.

    Attributes:
        tensors: What a `NativeScan` reads after the convolution.
    """

    def __init__(self, layer: Layer, config: ModelConfig, dtype: torch.dtype) -> None:
        assert config.mamba is not None and layer.decay is not None
        assert layer.skip is not None and layer.step_bias is not None
        self._shape, self._eps = config.mamba, config.norm_eps
        self._step_bias, self._skip = layer.step_bias.to(dtype), layer.skip.to(dtype)
        self._gate_norm = None if layer.gate_norm is None else layer.gate_norm.to(dtype)
        self._decay = -layer.decay.to(dtype).exp()
        self.tensors = self._step_bias, self._decay, self._skip, self._gate_norm
        sizes = config.mamba.heads, config.mamba.head_dim, config.mamba.state
        self.nothing = torch.zeros(sizes, dtype=dtype, device=layer.decay.device)

    def scan(
        self, mixed: torch.Tensor, raw: torch.Tensor, seen: torch.Tensor, count: int, state: torch.Tensor
    ) -> torch.Tensor:
        """See `StateRule.scan`."""
        steps, x, b, c = self._parts(mixed, raw)
        found = [
            tree_scan(steps, self._decay, x, b, some, own, state)
            for some, own in zip(c[-count:].split(_AT_ONCE), seen[-count:].split(_AT_ONCE), strict=True)
        ]
        return (torch.cat(found) + x[-count:] * self._skip[:, None]).flatten(1)

    def advance(self, mixed: torch.Tensor, raw: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule.advance`."""
        steps, x, b, _ = self._parts(mixed, raw)
        return advance(steps, self._decay, x, b, state)

    def gated(self, said: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `StateRule.gated`."""
        gated = said * silu(gate)
        if self._gate_norm is None:
            return gated
        gated = gated.unflatten(1, (self._shape.groups, -1))
        return rms_norm(gated, gated.shape[-1:], None, self._eps).flatten(1) * self._gate_norm

    def _parts(
        self, mixed: torch.Tensor, raw: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Steps, x, b and c, see `tree_scan`."""
        shape = self._shape
        steps = softplus(raw + self._step_bias).clamp(shape.least_step, shape.most_step)
        size, groups = shape.groups * shape.state, (shape.groups, shape.state)
        x, b, c = mixed.split((shape.inner, size, size), dim=1)
        return steps, x.unflatten(1, (shape.heads, -1)), b.unflatten(1, groups), c.unflatten(1, groups)
