"""Layers that keep a state in place of keys and values: Mamba-2's recurrence over the rows of a tree, all at once.

Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality (2024) and
STree: Speculative Tree Decoding for Hybrid State-Space Models (2025). The state h of one head, [head_dim, state], goes
on as h' = exp(t a) h + t x b, and a row says c h' + d x, where t, x, b and c come from the row and those right before
it, and a < 0 belongs to the head.

What the cache keeps of a row is not a state but the few numbers a state is made from, in the slots where other layers
have keys and values. So a text is kept, cut, marked and forked as any other is, and the state after its content is
made of these numbers when the next pass needs it: no state is ever stored for a node of a tree. In float32 on a CPU
native kernels go through the rows (`native_scan`); elsewhere, and where gradients are gathered, PyTorch scans them.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, rms_norm, silu, softplus

from decodery.core.native.kernels import library

from ..batch import Segment
from ..cache.cache import KVCache
from ..cache.kept_rows import KeptRows, behind
from ..config import ModelConfig
from ..native.scan import NativeScan
from .weights import Layer

CHUNK = 64
"""Rows that are scanned together."""


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


def slots_of(config: ModelConfig, layer: int) -> list[int]:
    """The layers of a cache that hold what a recurrent layer keeps of its rows, its own where it is free."""
    assert config.mamba is not None
    spans = config.mamba.spans(config.num_kv_heads, config.head_dim)
    first = config.num_layers + (spans - 1) * sum(config.mamba_layers[:layer]) + sum(config.attending_layers[:layer])
    # Where a layer attends as well, its own slots hold keys and values.
    own = [] if config.attends_too(layer) else [layer]
    return [*own, *range(first, first + spans - len(own))]


class Recurrence:
    """The mixer of one Mamba-2 layer, between its two projections."""

    def __init__(self, layer: Layer, index: int, config: ModelConfig) -> None:
        assert config.mamba is not None and layer.decay is not None and layer.conv is not None
        assert layer.skip is not None and layer.step_bias is not None
        dtype = self._dtype = torch.promote_types(layer.decay.dtype, torch.float32)
        self._shape, self._index, self._eps = config.mamba, index, config.norm_eps
        room = 2 * config.num_kv_heads * config.head_dim
        self._rows = KeptRows(slots_of(config, index), config.mamba.width, room)
        self._conv = layer.conv.to(dtype)
        self._conv_bias = None if layer.conv_bias is None else layer.conv_bias.to(dtype)
        self._step_bias, self._skip = layer.step_bias.to(dtype), layer.skip.to(dtype)
        self._gate_norm = None if layer.gate_norm is None else layer.gate_norm.to(dtype)
        self._decay = -layer.decay.to(dtype).exp()
        # Before the first row; states are never written to.
        sizes = config.mamba.heads, config.mamba.head_dim, config.mamba.state
        self._nothing = torch.zeros(sizes, dtype=dtype, device=layer.decay.device)
        self._native: NativeScan | None = None
        if dtype == torch.float32 and layer.decay.device.type == "cpu" and library() is not None:
            tensors = self._conv, self._conv_bias, self._step_bias, self._decay, self._skip, self._gate_norm
            self._native = NativeScan(config.mamba, tensors, config.norm_eps)

    def __call__(self, projected: torch.Tensor, segment: Segment, line: torch.Tensor | None) -> torch.Tensor:
        """Rows [n, inner + channels + heads] of one segment, as the first projection gives them -> [n, inner].

        line: [T] what `kept_rows.parents` says of the segment's tentative rows, None where they follow each other.
        """
        shape, cache = self._shape, segment.cache
        gate, held = projected.to(self._dtype).split((shape.inner, shape.width), dim=1)
        reach, native = 0, None if projected.requires_grad else self._native
        if cache is None:
            state = self._nothing
        else:
            self._rows.write(cache, held)
            state, content = self._state(cache), int(cache.lengths[self._index])
            reach = min(content, shape.kernel - 1)
            held = self._read(cache, content - reach, content + cache.tentative)
        if native is not None:
            return native.said(held, reach, line, state, gate).to(projected.dtype)
        gated = self._said(held, reach, segment, line, state).flatten(1) * silu(gate)
        if self._gate_norm is None:
            return gated.to(projected.dtype)
        gated = gated.unflatten(1, (shape.groups, -1))
        normed = rms_norm(gated, gated.shape[-1:], None, self._eps).flatten(1) * self._gate_norm
        return normed.to(projected.dtype)

    def _said(
        self, held: torch.Tensor, reach: int, segment: Segment, line: torch.Tensor | None, state: torch.Tensor
    ) -> torch.Tensor:
        """What a segment's rows say, [n, heads, head_dim]. held: `reach` rows of content, then all tentative ones."""
        n, found = len(segment), []
        if line is None:
            steps, x, b, c = self._inputs(held, torch.arange(-1, len(held) - 1, device="cpu"), reach)
            for first in range(0, n, CHUNK):
                some = slice(first, first + CHUNK)
                taken, at, led = steps[some], x[some], b[some]
                seen = torch.ones(len(at), len(at), dtype=torch.bool, device=held.device).tril()
                found.append(tree_scan(taken, self._decay, at, led, c[some], seen, state))
                if first + CHUNK < n:
                    state = advance(taken, self._decay, at, led, state)
        else:
            seen = torch.from_numpy(segment.seen()).to(held.device)
            steps, x, b, c = self._inputs(held, behind(line, reach), reach)
            for first in range(0, n, CHUNK):
                rows = slice(segment.retained + first, segment.retained + first + CHUNK)
                found.append(tree_scan(steps, self._decay, x, b, c[rows], seen[first : first + CHUNK], state))
        return torch.cat(found) + x[-n:] * self._skip[:, None]

    def _inputs(
        self, held: torch.Tensor, parent: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Steps, x, b and c (see `tree_scan`) of the rows from `first` on.

        held: [m, channels + heads], what is kept of rows; parent: [m], the one before each, -1 for none.
        """
        shape = self._shape
        rows, raw = held.split((shape.channels, shape.heads), dim=1)
        steps = softplus(raw[first:] + self._step_bias).clamp(shape.least_step, shape.most_step)
        # Where nothing comes before, and before that, stands a row of zeros.
        rows = pad(rows, (0, 0, 0, 1))
        parent = pad(parent.to(held.device), (0, 1), value=-1)
        place = torch.arange(first, len(held), device=held.device)
        found = torch.zeros(len(place), shape.channels, dtype=held.dtype, device=held.device)
        for back in range(shape.kernel):
            found = found + rows[place] * self._conv[:, -1 - back]
            place = parent[place]
        mixed = silu(found if self._conv_bias is None else found + self._conv_bias)
        size = shape.groups * shape.state
        x, b, c = mixed.split((shape.inner, size, size), dim=1)
        groups = (shape.groups, shape.state)
        return steps, x.unflatten(1, (shape.heads, -1)), b.unflatten(1, groups), c.unflatten(1, groups)

    def _state(self, cache: KVCache) -> torch.Tensor:
        """The state after the content of a cache, from the last one that is known and what has come since."""
        content = int(cache.lengths[self._index])
        done, state = cache.states.last(self._index) or (0, self._nothing)
        if done == content:
            return state
        while done < content:
            stop, reach = min(done + CHUNK, content), min(done, self._shape.kernel - 1)
            held = self._read(cache, done - reach, stop)
            if self._native is not None:
                done, state = stop, self._native.advance(held, reach, state)
                continue
            steps, x, b, _ = self._inputs(held, torch.arange(-1, len(held) - 1, device="cpu"), reach)
            done, state = stop, advance(steps, self._decay, x, b, state)
        cache.states.add(self._index, content, state)
        return state

    def _read(self, cache: KVCache, start: int, stop: int) -> torch.Tensor:
        """What is kept of rows [start, stop) of content and tentative ones: [m, channels + heads]."""
        return self._rows.read(cache, start, stop).to(self._dtype)
