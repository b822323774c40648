"""Layers of a short convolution between two gates, in place of attention (LFM2 Technical Report, 2025).

Of what a row is projected to, b, c and x, y_t = c_t * sum over w < W of k_w * (b x)_{t-w}, elementwise. The row before
a row is the one that it sees last, its parent in a tree; before the first row there are zeros. The cache keeps b x of
every row in the slots where other layers have keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from decodery.core.native.kernels import Rule, address
from decodery.core.native.structs import MixerStruct

from ..batch import Segment
from ..cache.kept_rows import KeptRows, behind
from ..config import ModelConfig
from .weights import Layer


def slots_of(config: ModelConfig, layer: int) -> list[int]:
    """The layers of a cache that hold what such a layer keeps of its rows."""
    more = config.conv_spans - 1
    first = config.num_layers + more * sum(config.conv_layers[:layer])
    return [layer, *range(first, first + more)]


class GatedConvolution:
    """That of one layer, between its two projections."""

    def __init__(self, layer: Layer, index: int, config: ModelConfig) -> None:
        assert layer.conv is not None
        self._index, self._kernel = index, config.gated_conv
        self._rows = KeptRows(slots_of(config, index), config.hidden_size, 2 * config.num_kv_heads * config.head_dim)
        self._conv = layer.conv
        self._taps = layer.conv.detach().float().T.contiguous()

    @property
    def native(self) -> tuple[MixerStruct, Sequence[int]]:
        """See `native.mixers.Mixers`."""
        kernel, width = self._taps.shape
        taps = address(self._taps, torch.float32, kernel, width)
        return MixerStruct(taps, heads=1, head_dim=width, kernel=kernel, rule=Rule.GATED_CONV), self._rows.slots

    def __call__(self, projected: torch.Tensor, segment: Segment, line: torch.Tensor | None) -> torch.Tensor:
        """Rows [n, 3 hidden] of one segment, as the first projection gives them -> [n, hidden].

        line: [T] what `kept_rows.parents` says of the segment's tentative rows, None where they follow each other.
        """
        before, after, x = projected.chunk(3, dim=1)
        held, reach, cache = before * x, 0, segment.cache
        if cache is not None:
            self._rows.write(cache, held)
            content = int(cache.lengths[self._index])
            reach = min(content, self._kernel - 1)
            held = self._rows.read(cache, content - reach, content + cache.tentative).to(projected.dtype)
        if line is None:
            parent = torch.arange(-1, len(held) - 1, device=held.device)
        else:
            parent = behind(line, reach).to(held.device)
        # Where nothing comes before, and before that, stands a row of zeros.
        rows, parent = pad(held, (0, 0, 0, 1)), pad(parent, (0, 1), value=-1)
        place = torch.arange(len(held) - len(projected), len(held), device=held.device)
        conv, found = self._conv.to(projected.dtype), torch.zeros_like(x)
        for back in range(self._kernel):
            found = found + rows[place] * conv[:, -1 - back]
            place = parent[place]
        return after * found
