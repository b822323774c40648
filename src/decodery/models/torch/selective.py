"""Mamba-1's states: Mamba, Linear-Time Sequence Modeling with Selective State Spaces (2023).

Every channel has a state of `state` numbers, which go on as h' = exp(t a) h + t x b, and a row says c h' + d x. Steps t
of channels, b and c are made of the row after the convolution; a < 0 belongs to channel and number, so that no product
of rows says what lies between two of them: rows are gone through one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import rms_norm, silu, softplus

from ..config import ModelConfig
from .weights import Layer


class SelectiveRule:
    """See `recurrence.StateRule`.

    Attributes:
        tensors: What a `NativeScan` reads after the convolution.
    """

    def __init__(self, layer: Layer, config: ModelConfig, dtype: torch.dtype) -> None:
        assert config.selective is not None and layer.decay is not None and layer.select_in is not None
        assert layer.skip is not None and layer.step_bias is not None and layer.select_out is not None
        shape = self._shape = config.selective
        self._in, self._out = layer.select_in.to(dtype), layer.select_out.to(dtype)
        self._norm = None if layer.select_norm is None else layer.select_norm.to(dtype)
        self._step_bias, self._skip = layer.step_bias.to(dtype), layer.skip.to(dtype)
        self._decay = -layer.decay.to(dtype).exp()
        self.tensors = self._step_bias, self._decay, self._skip, None, self._in, self._out, self._norm
        self.nothing = torch.zeros((shape.heads, 1, shape.state), dtype=dtype, device=layer.decay.device)

    def scan(
        self, mixed: torch.Tensor, raw: torch.Tensor, seen: torch.Tensor, count: int, state: torch.Tensor
    ) -> torch.Tensor:
        """See `StateRule.scan`."""
        rows = torch.arange(len(seen), device=seen.device)
        # The last row that each sees before itself.
        parents = torch.where(seen & (rows < rows[:, None]), rows, -1).amax(dim=1)
        states, lead_out = self._states(mixed, parents.tolist(), state)
        said = (torch.stack(states[-count:]) * lead_out[-count:, None]).sum(dim=-1)
        return said + mixed[-count:] * self._skip

    def advance(self, mixed: torch.Tensor, raw: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """See `StateRule.advance`."""
        return self._states(mixed, range(-1, len(mixed) - 1), state)[0][-1][:, None]

    def gated(self, said: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `StateRule.gated`."""
        return said * silu(gate)

    def _states(
        self, mixed: torch.Tensor, parents: Sequence[int], state: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """States [channels, state] after each of T rows, and what leads out of them [T, state]."""
        shape, led = self._shape, mixed @ self._in.T
        parts = led.split((shape.rank, shape.state, shape.state), dim=1)
        if shape.step_eps is not None:
            weights = (None,) * 3 if self._norm is None else self._norm.split((shape.rank, shape.state, shape.state))
            parts = tuple(
                rms_norm(part, part.shape[-1:], weight, shape.step_eps)
                for part, weight in zip(parts, weights, strict=True)
            )
        steps = softplus(parts[0] @ self._out.T + self._step_bias)
        added = (steps * mixed)[..., None] * parts[1][:, None]
        found: list[torch.Tensor] = []
        for row, parent in enumerate(parents):
            before = state[:, 0] if parent < 0 else found[parent]
            found.append(before * (steps[row, :, None] * self._decay).exp() + added[row])
        return found, parts[2]
