"""Mixers with states in native calls: rows one after another, each from the state of the one before it, in float32.

What a row says is then the same bits however a text was cut into passes and whatever was drafted beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from decodery.core.native.kernels import Rule, address, check, library
from decodery.core.native.structs import MixedStruct, MixerStruct

from ..config import GatedDelta, Mamba, Selective


class NativeScan:
    """The mixer of one layer between its projections; None of its tensors may be moved while it lives.

    Args:
        tensors: Convolution [channels, kernel], its bias or None, the steps' bias, decay < 0 and skip [heads] each, and
            the gated norm [inner] or None, all float32 on the CPU. Of Gated DeltaNet there is no skip, and the norm is
            that of a head. Of Mamba-1 decay is [heads, state], and three more follow: `Layer.select_in`, `select_out`
            and `select_norm` or None.
    """

    def __init__(
        self, shape: Mamba | Selective | GatedDelta, tensors: Sequence[torch.Tensor | None], eps: float
    ) -> None:
        self._shape = shape
        delta = isinstance(shape, GatedDelta)
        self._alive = [None if each is None else each.detach().contiguous() for each in tensors]
        channels, heads = (shape.channels,), (shape.heads,)
        norm = (shape.head_dim if delta else shape.inner,)
        decay: tuple[int, ...] = heads
        more: list[tuple[int, ...]] = []
        if isinstance(shape, Selective):
            led, decay = shape.rank + 2 * shape.state, (shape.heads, shape.state)
            more = [(led, shape.heads), (shape.heads, shape.rank), (led,)]
        sizes = (*channels, shape.kernel), channels, heads, decay, heads, norm, *more
        pointers = [
            None if each is None else address(each, torch.float32, *size)
            for each, size in zip(self._alive, sizes, strict=True)
        ]
        bounds = (shape.least_step, shape.most_step) if isinstance(shape, Mamba) else (0.0, 1e30)
        rule = Rule.GATED_DELTA if delta else Rule.MAMBA1 if more else Rule.MAMBA2
        self.struct = MixerStruct(
            *pointers[:6], shape.heads, shape.head_dim, shape.groups, shape.state, shape.kernel, *bounds, eps, rule,
            isinstance(shape, GatedDelta) and shape.in_turns,
        )  # fmt: skip
        if isinstance(shape, Selective):
            self.struct.select_in, self.struct.select_out, self.struct.select_norm = pointers[6:]
            self.struct.rank, self.struct.step_eps = shape.rank, shape.step_eps or 0.0
        sides = (shape.state, shape.head_dim) if delta else (shape.head_dim, shape.state)
        self._state = shape.heads, *sides

    def said(
        self, held: torch.Tensor, reach: int, line: torch.Tensor | None, state: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """What the last n rows say, gated and normed: [n, inner].

        Args:
            held: [reach + T, channels + steps], rows of content and then all tentative ones.
            line: [T] the tentative row right before each, -1 for none, None where they follow each other.
            state: [heads, head_dim, state] after the content, of Gated DeltaNet [heads, state, head_dim].
            gate: [n, inner] of a tensor whose rows may be further apart.
        """
        out = torch.empty(len(gate), self._shape.inner, dtype=torch.float32, device="cpu")
        mixed = MixedStruct(gate_stride=gate.stride(0), said=len(gate))
        mixed.out, mixed.gate = (
            address(each, torch.float32, len(gate), self._shape.inner, apart=True) for each in (out, gate)
        )
        parents = None if line is None else line.to(torch.int32).contiguous()
        mixed.parents = None if parents is None else address(parents, torch.int32, len(held) - reach)
        self._run(mixed, held, reach, state)
        return out

    def advance(self, held: torch.Tensor, reach: int, state: torch.Tensor) -> torch.Tensor:
        """The state after rows that follow each other, held after `reach` others."""
        after = torch.empty_like(state)
        self._run(MixedStruct(after=address(after, torch.float32, *state.shape)), held, reach, state)
        return after

    def _run(self, mixed: MixedStruct, held: torch.Tensor, reach: int, state: torch.Tensor) -> None:
        held, lib = held.contiguous(), library()
        assert lib is not None
        shape = self._shape
        mixed.held = address(held, torch.float32, None, shape.width)
        mixed.state = address(state, torch.float32, *self._state)
        mixed.reach, mixed.rows = reach, len(held) - reach
        check(lib.decodery_mix(ctypes.addressof(self.struct), ctypes.addressof(mixed)))
