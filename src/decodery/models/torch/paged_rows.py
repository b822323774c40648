"""Attention of all texts of a pass in one call per layer, over pages that lie on their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ..batch import Segment
from ..cache import coded
from ..cache.page_pool import SLOTS, TensorPool
from ..config import ModelConfig
from ..cuda.launches import launches
from .attention import capped, shares
from .row_layout import BITS, Layout, SegmentRows

if TYPE_CHECKING:
    from ..cache.device_tables import DeviceTables

_SMALL, _LARGE = 16, 64
"""Query rows of one program of a kernel: of a step, and of a prompt."""
_WIDEST = 256
"""Elements of a head up to which what a program works with fits beside it."""


@dataclass(frozen=True)
class _Group:
    """Rows of texts that are padded to as many rows each.

    Attributes:
        rows: [texts, rows] their numbers; fillers repeat a text's first one.
        slots: Slots that are looked at.
    """

    rows: torch.Tensor
    slots: int


class PagedRows:
    """The rows of one pass on their device, and attention over the pages of their texts.

    Args:
        layout: Sizes.
        buffer: [layout.size] int32 on the device, as `Layout.fill` writes it.
        pool: Where the pages are.
        tables: Where the texts' page tables are.
        groups: For PyTorch: which rows it takes together, and the number that each row has among those of all groups;
            None takes every row by itself, whatever the texts are.
    """

    def __init__(
        self,
        layout: Layout,
        buffer: torch.Tensor,
        pool: TensorPool,
        tables: DeviceTables,
        groups: tuple[list[_Group], torch.Tensor] | None = None,
    ) -> None:
        self.layout, self.pool, self.tables = layout, pool, tables.held
        self.places, self.lengths, self.slots, self.begins, self.bits, self.tiles = layout.fields(buffer)
        self.kernel = kernel_for(pool)
        if self.kernel is None:
            self._columns, self._offsets = (self.slots // SLOTS).long(), (self.slots % SLOTS).long()[:, None]
            self._texts = self.places.long()
            every = torch.arange(layout.rows, device=buffer.device)[:, None]
            each = _Group(every, self.tables.shape[3] * SLOTS)
            self._groups = [each] if groups is None else groups[0]
            self._order = None if groups is None else groups[1]
            self._masks: dict[tuple[int, int], torch.Tensor] = {}

    @classmethod
    def of(
        cls, segments: Sequence[Segment], config: ModelConfig, windows: list[int | None], dtype: torch.dtype
    ) -> PagedRows:
        """The rows of these texts, brought to the device by one copy, and changed page tables by another.

        Args:
            segments: The texts.
            config: Of the model.
            windows: See `windows_of`.
            dtype: Of queries.
        """
        caches = [segment.cache for segment in segments if segment.cache is not None]
        pool, counts = caches[0].pages.pool, [len(segment) for segment in segments]
        assert isinstance(pool, TensorPool)
        tables = pool.tables(*caches[0].pages.table.shape[:2])
        tile_rows = rows_of_tile(max(counts), config.num_heads // config.num_kv_heads, dtype)
        tiles = sum(-(-n // tile_rows) for n in counts)
        words = -(-max(segment.retained + len(segment) for segment in segments) // BITS)
        layout = Layout(sum(counts), words, len(windows), tiles, tile_rows)
        plain = kernel_for(pool) is None
        classes, order = _classes(counts) if plain else ([], np.zeros(0, dtype=np.int64))
        size = layout.size + sum(rows.size for _, rows in classes) + len(order)
        host = np.zeros(size, dtype=np.int32)
        with pool.still():
            places = tables.places([cache.pages for cache in caches])
        rows_of_texts = SegmentRows.of(segments)
        layout.fill(host[: layout.size], rows_of_texts, places, windows)
        host[layout.size :] = np.concatenate([*(rows.reshape(-1) for _, rows in classes), order])
        buffer = torch.from_numpy(host).to(pool.device, non_blocking=True)
        rows_of_texts.see_there(layout.fields(buffer)[4])
        if not plain:
            return cls(layout, buffer, pool, tables)
        groups, first = [], layout.size
        for texts, rows in classes:
            most = max(caches[text].length + segments[text].retained + len(segments[text]) for text in texts)
            given = buffer[first : first + rows.size].long().view(rows.shape)
            groups.append(_Group(given, -(-most // SLOTS) * SLOTS))
            first += rows.size
        return cls(layout, buffer, pool, tables, (groups, buffer[first:].long()))

    def attend(
        self,
        layer: int,
        kind: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values [N, kv_heads, head_dim] to their slots of a layer, and attend.

        Args:
            layer: The layer's number.
            kind: The number of its window.
            queries: [N, heads, head_dim].
            keys, values: Of the rows.
            scale, cap, sinks: See `attention.attend`.

        Returns:
            [N, heads * head_dim].
        """
        table, pool = self.tables[:, layer], self.pool
        if self.kernel is not None:
            # Triton launches on the current device, whatever its tensors lie on.
            with torch.cuda.device_of(queries):
                return self.kernel(self, table, kind, queries, keys, values, scale, cap, sinks)
        rows, written = torch.stack((keys, values)), table[self._texts, :, self._columns]
        pool.put(written.long(), self._offsets, coded.encode(rows, pool.dtype) if pool.beside else rows)
        parts = []
        for number, group in enumerate(self._groups):
            parts.append(self._attend(number, group, table, kind, queries, scale, cap, sinks))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self._order is None else joined[self._order]

    def _attend(
        self,
        number: int,
        group: _Group,
        table: torch.Tensor,
        kind: int,
        queries: torch.Tensor,
        scale: float,
        cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend` of one group: [texts * rows, heads * head_dim]."""
        (texts, rows), (_, heads, dim), kv_heads = group.rows.shape, queries.shape, table.shape[1]
        own = table[self._texts[group.rows[:, 0]], :, : group.slots // SLOTS].long()
        held = self.pool.rows(own, slice(None))
        if self.pool.beside:
            held = coded.decode(held).to(queries.dtype)
        keys, values = held.flatten(3, 4)
        # Query heads that share a key-value head are rows of that head, so nothing is repeated.
        grouped = queries[group.rows].view(texts, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        asked = grouped.reshape(texts, kv_heads, -1, dim)
        seen = self._mask(number, kind, group).repeat(1, heads // kv_heads, 1)[:, None]
        if cap or sinks is not None:
            scores = capped(asked @ keys.transpose(-1, -2) * scale, cap).masked_fill(~seen, -torch.inf)
            found = shares(scores, sinks) @ values
        else:
            found = scaled_dot_product_attention(asked, keys, values, attn_mask=seen, scale=scale)
        return found.view(texts, kv_heads, -1, rows, dim).permute(0, 3, 1, 2, 4).reshape(texts * rows, heads * dim)

    def _mask(self, number: int, kind: int, group: _Group) -> torch.Tensor:
        """[texts, rows, slots] bool, what the rows of a group see in layers of one kind."""
        if (number, kind) not in self._masks:
            slots = torch.arange(group.slots, dtype=torch.int32, device=self.slots.device)
            lengths = self.lengths[group.rows[:, :1]][..., None]
            own, last = slots - lengths, self.layout.words * BITS - 1
            # Of slots that no bit is about none is seen.
            within, own = own <= last, own.clamp(0, last)
            bits = self.bits[kind][group.rows]
            words = bits.gather(2, (own // BITS).expand(*group.rows.shape, -1).long())
            tentative = ((words >> (own % BITS)) & 1).bool() & within
            content = slots >= self.begins[kind][group.rows][..., None]
            self._masks[number, kind] = torch.where(slots < lengths, content, tentative)
        return self._masks[number, kind]


def _classes(counts: list[int]) -> tuple[list[tuple[list[int], np.ndarray]], np.ndarray]:
    """Texts with similarly many rows: their numbers, and their rows [texts, rows]; and where each row then stands."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    alike: dict[int, list[int]] = {}
    for text, n in enumerate(counts):
        alike.setdefault((n - 1).bit_length(), []).append(text)
    classes, order, before = [], np.zeros(int(starts[-1]), dtype=np.int64), 0
    for texts in alike.values():
        most = max(counts[text] for text in texts)
        first, ns = starts[texts], np.array([counts[text] for text in texts])
        offsets = np.arange(most)
        classes.append((texts, first[:, None] + np.where(offsets < ns[:, None], offsets, 0)))
        for number, text in enumerate(texts):
            order[starts[text] : starts[text + 1]] = before + number * most + np.arange(counts[text])
        before += len(texts) * most
    return classes, order


def windows_of(config: ModelConfig) -> list[int | None]:
    """The windows that layers of a model differ in."""
    return list(dict.fromkeys(config.window(layer) for layer in range(config.num_layers)))


def rows_of_tile(most: int, group: int, dtype: torch.dtype) -> int:
    """Rows of a text that a kernel takes together.

    Args:
        most: Rows that texts have at most.
        group: Heads that share keys and values.
        dtype: Of queries, whatever pages hold.
    """
    # Kernels write products of float32 out.
    few = most * group <= _SMALL or dtype.itemsize > 2
    return max((_SMALL if few else _LARGE) // group, 1)


def serves(segment: Segment, config: ModelConfig) -> bool:
    """Whether attention of these rows can be computed with that of other texts."""
    cache = segment.cache
    if cache is None or segment.sparse or cache.evicted or not isinstance(cache.pages.pool, TensorPool):
        return False
    # Rows that see later ones may look beyond a window's end, too.
    return config.causal or config.sliding_window is None


def kernel_for(pool: TensorPool) -> Callable[..., torch.Tensor] | None:
    """The kernel for pages of a pool; None where there is none, and PyTorch does it."""
    wide = pool.dtype.itemsize > 4 or pool.row - pool.beside > _WIDEST
    if pool.device.type != "cuda" or wide or not launches(pool.device):
        return None
    from ..cuda.paged_kernel import attend

    return attend
