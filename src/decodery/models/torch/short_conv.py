"""Dynamic short convolutions on queries, keys and values, whose filters are made of the row they are for.

Dynamic Short Convolutions Improve Transformers (2026). Of a row x_t of queries, keys or values before rotation, and
u_t, what they are projected from: y_t = x_t + sum over w < W of K_t[w] * x_{t-w}, elementwise, where K_t = (P u_t) U +
s. The row before a row is the one that it sees last, its parent in a tree; before the first row there are zeros.

The cache keeps the rows before the convolution beside keys and values, which are those after it. A text may be cut
anywhere, so all of them are kept and not the last W - 1 alone: it costs memory, and reads of W - 1 rows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

from ..batch import Segment
from ..cache.kept_rows import KeptRows, behind, parents
from ..config import ModelConfig
from .weights import Layer


def slots_of(config: ModelConfig, layer: int) -> range:
    """The cache layers of a layer's rows before the convolution; they follow those of keys and values."""
    assert config.short_conv is not None
    spans = config.short_conv.spans(config.num_heads, config.num_kv_heads)
    return range(config.num_layers + layer * spans, config.num_layers + (layer + 1) * spans)


class ShortConvolution:
    """That of one layer."""

    def __init__(self, layer: Layer, index: int, config: ModelConfig) -> None:
        assert config.short_conv is not None
        assert layer.short_in is not None and layer.short_out is not None and layer.short_static is not None
        self._shape, self._index, dim = config.short_conv, index, config.head_dim
        self._sizes = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        width, room = sum(self._sizes), 2 * config.num_kv_heads * dim
        self._rows = KeptRows(slots_of(config, index), width, room)
        self._in, self._out, self._static = layer.short_in, layer.short_out, layer.short_static

    def __call__(self, projected: torch.Tensor, normed: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Rows [n, width] of one segment as they are projected from `normed` [n, hidden] -> [n, width]."""
        n, held, reach, cache = len(projected), projected, 0, segment.cache
        if cache is not None:
            self._rows.write(cache, projected)
            content = int(cache.lengths[self._index])
            reach = min(content, self._shape.kernel - 1)
            held = self._rows.read(cache, content - reach, content + cache.tentative).to(projected.dtype)
        if segment.mask is None:
            parent = torch.arange(-1, len(held) - 1, device=held.device)
        else:
            parent = behind(parents(torch.from_numpy(segment.seen()).to(held.device)), reach)
        # Where nothing comes before, and before that, stands a row of zeros.
        rows, parent = pad(held, (0, 0, 0, 1)), pad(parent, (0, 1), value=-1)
        filters, found = self._filters(normed), projected
        place = torch.arange(len(held) - n, len(held), device=held.device)
        for back in range(self._shape.kernel):
            found = found + filters[:, back] * rows[place]
            place = parent[place]
        return found

    def _filters(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, kernel, width] of rows [n, hidden]."""
        ranks = linear(normed, self._in).chunk(3, dim=1)
        outs = self._out.unflatten(0, (self._shape.rank, self._shape.kernel)).split(self._sizes, dim=2)
        made = [torch.einsum("nr,rwd->nwd", each, out) for each, out in zip(ranks, outs, strict=True)]
        return torch.cat(made, dim=2) + self._static
