"""One sequence's keys and values: content that counts, and tentative rows of passes behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakSet

import numpy as np
import torch

from ..errors import OutOfMemory


class Storage:
    """The tensor behind one or more caches, and how many of them share it. Whoever replaces `data` copies all slots."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.owners = 1


@dataclass(frozen=True, eq=False)
class Mark:
    """What was content of a cache at some moment. lengths: [layers]."""

    lengths: np.ndarray
    next_position: int


class KVCache:
    """Keys and values of one sequence, per layer, with a length per layer and the position of every slot.

    data: [layers, 2 (keys, values), kv_heads, capacity, head_dim]. Slots [0, length) are content in ascending
    position order; passes write their rows behind them, tentatively, and `keep` decides which of these become content.
    Memory is taken when the first rows are written, for `capacity` slots or more; from then on capacity doubles, so
    growing costs no copy per token. Forks share storage until one of them writes.
    prefix: how many of the first slots belong to no token, but to a learned past at positions -prefix to -1.
    scratch: how many tentative rows there are. stays: how many of them the pass in progress found here. written:
    [layers], how many of them, from the first on, each layer has been given.
    counts: what passes cost or did beyond their rows, by name, since the engine last moved it into the trace.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int = 256,
    ) -> None:
        self.storage = Storage(_allocate((layers, 2, kv_heads, 0, head_dim), dtype, device))
        self.lengths = np.zeros(layers, dtype=np.int64)
        self.positions = np.zeros((layers, 0), dtype=np.int32)
        self.next_position = 0
        self.prefix = 0
        self.scratch = 0
        self.stays = 0
        self.written = np.zeros(layers, dtype=np.int64)
        self.counts: Counter[str] = Counter()
        self._marks: WeakSet[Mark] = WeakSet()
        self._first = capacity

    @property
    def data(self) -> torch.Tensor:
        """[layers, 2, kv_heads, capacity, head_dim]; read it only after `reserve`, which may replace it."""
        return self.storage.data

    @property
    def capacity(self) -> int:
        return self.storage.data.shape[3]

    @property
    def length(self) -> int:
        """Slots that hold content; the largest over the layers where eviction made them differ."""
        return int(self.lengths.max())

    @property
    def evicted(self) -> bool:
        """Whether some layer no longer holds every position from 0 on."""
        return bool((self.lengths != self.prefix + self.next_position).any())

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values that one slot takes in all layers."""
        layers, both, kv_heads, _, head_dim = self.data.shape
        return layers * both * kv_heads * head_dim * self.data.itemsize

    def room_for(self, tokens: int) -> int:
        """Slots that memory is taken for when a text of so many tokens is read."""
        return max(tokens + self.prefix, self._first)

    def provide(self, slots: int) -> None:
        """Have room for exactly `slots` tokens, or for the content if that is more: no more memory, and no less."""
        self._first = slots + self.prefix
        if self.capacity not in (0, self._first):
            self._replace(max(self._first, self.length + self.scratch))

    def prepend(self, data: torch.Tensor) -> None:
        """Put keys and values [layers, 2, kv_heads, n, head_dim] that belong to no token before an empty cache's text.

        Keys are as attention uses them. The text still begins at position 0, and cutting it leaves them in place.
        """
        if self.length or self.prefix:
            raise ValueError("only a cache that holds nothing can be given a prefix")
        n = data.shape[3]
        self._replace(n)
        self.data.copy_(data)
        self.positions[:] = np.arange(-n, 0)
        self.lengths += n
        self.prefix = n
        self._first += n

    def reserve(self, positions: np.ndarray, stays: int = 0, layers: Sequence[int] | None = None) -> None:
        """Make room, owned by this cache alone, for tentative rows at `positions` [n]. Called once by each pass.

        stays: how many tentative rows remain before them. layers: those that the pass runs, None for all.
        """
        known = self._known(layers).min(initial=self.scratch)
        if not 0 <= stays <= known:
            raise IndexError(f"{stays} rows cannot stay where there are {known} tentative ones")
        n, starts = stays + len(positions), set(self.lengths.tolist())
        needed = max(starts) + n
        if needed > self.capacity:
            self._replace(max(needed, 2 * self.capacity, self._first))
        elif self.storage.owners > 1:
            self._replace(self.capacity)
        self.scratch, self.stays = n, stays
        np.minimum(self.written, stays, out=self.written)
        for start in starts:
            alike = slice(None) if len(starts) == 1 else self.lengths == start
            self.positions[alike, start + stays : start + n] = positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values of a pass's rows, each [n, kv_heads, head_dim], of one layer."""
        start = int(self.lengths[layer])
        slots = self.data[layer, :, :, start + self.stays : start + self.scratch]
        slots[0].copy_(keys.transpose(0, 1))
        slots[1].copy_(values.transpose(0, 1))
        self.written[layer] = self.scratch

    def wrote(self, layers: Sequence[int]) -> None:
        """A pass has put the keys and values of its rows into these layers by itself, not by `write`."""
        self.written[np.asarray(layers, dtype=np.int64)] = self.scratch

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of content and tentative rows, [kv_heads, length + scratch, head_dim] each, not copied."""
        stop = int(self.lengths[layer]) + self.scratch
        both = self.data[layer, :, :, :stop]
        return both[0], both[1]

    def keep(self, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        """Turn these tentative rows into content, in this order, and forget the others.

        Rows are counted from the first one that stayed, and must ascend in position. layers: which of them keep the
        rows; None: every layer keeps those that it has been given, which after a pass through some layers may be none.
        """
        picked = np.asarray(rows, dtype=np.int64)
        if len(picked):
            self._check(picked, layers)
            self.next_position = int(self.positions[0, self.lengths[0] + picked[-1]]) + 1
            chosen = range(len(self.lengths)) if layers is None else layers
            alike: dict[tuple[int, int], list[int]] = {}
            for layer in chosen:
                alike.setdefault((int(self.lengths[layer]), int(self.written[layer])), []).append(layer)
            for (start, written), those in alike.items():
                self._gather(those, start, picked[picked < written])
        self._forget()

    def mark(self) -> Mark:
        """What is content now, for `rewind` to return to, in this cache or a fork of it."""
        mark = Mark(self.lengths.copy(), self.next_position)
        self._marks.add(mark)
        return mark

    def rewind(self, mark: Mark) -> None:
        """Forget all that came after `mark`. Raises ValueError where some of what it marks is no longer there."""
        if mark not in self._marks:
            raise ValueError("what was marked has been cut or evicted since, or is another cache's: rewind before that")
        for layer, length in enumerate(mark.lengths):
            self._cut(layer, int(length))
        self.next_position = mark.next_position
        self._forget()

    def truncate(self, n: int) -> None:
        """Forget every slot whose position is n or later."""
        for layer, length in enumerate(self.lengths):
            self._cut(layer, int(np.searchsorted(self.positions[layer, :length], n)))
        self.next_position = min(self.next_position, n)
        self._forget()

    def fork(self) -> Self:
        """A cache with the same content; the two share memory until one of them writes."""
        twin = object.__new__(type(self))
        twin.storage = self.storage
        twin.storage.owners += 1
        twin.lengths = self.lengths.copy()
        twin.positions = self.positions.copy()
        twin.next_position = self.next_position
        twin.prefix = self.prefix
        twin.scratch = twin.stays = 0
        twin.written = np.zeros_like(self.written)
        twin.counts = Counter()
        twin._marks = WeakSet(self._marks)
        twin._first = self._first
        return twin

    def evict(self, layer: int, slots: Sequence[int]) -> None:
        """Drop these slots of one layer; the others keep their order and their positions."""
        length = int(self.lengths[layer])
        remaining = np.setdiff1d(np.arange(length), np.asarray(slots, dtype=np.int64))
        if self.storage.owners > 1:
            self._replace(self.capacity)
        index = torch.from_numpy(remaining).to(self.data.device)
        self.data[layer, :, :, : len(remaining)] = self.data[layer].index_select(2, index)
        self.positions[layer, : len(remaining)] = self.positions[layer, remaining]
        if len(remaining) < length:
            self._cut(layer, int(np.setdiff1d(slots, remaining)[0]))
        self.lengths[layer] = len(remaining)
        self._forget()

    def move(self, data: torch.Tensor) -> None:
        """Copy what is held to `data` [layers, 2, kv_heads, capacity, head_dim], its own storage from then on."""
        length = self.length + self.scratch
        data[:, :, :, :length] = self.data[:, :, :, :length]
        self.storage.owners -= 1
        self.storage = Storage(data)
        positions = np.zeros((len(self.lengths), self.capacity), dtype=np.int32)
        positions[:, :length] = self.positions[:, :length]
        self.positions = positions

    def __del__(self) -> None:
        # A storage nobody else owns any more may be written without a copy.
        storage = getattr(self, "storage", None)
        if storage is not None:
            storage.owners -= 1

    def _known(self, layers: Sequence[int] | None) -> np.ndarray:
        """How many tentative rows each of these layers has been given."""
        return self.written if layers is None else self.written[np.asarray(layers, dtype=np.int64)]

    def _check(self, rows: np.ndarray, layers: Sequence[int] | None) -> None:
        """Rows that may become content: written, and in positions that ascend behind it."""
        known = self.written.max() if layers is None else self._known(layers).min()
        if rows.min() < 0 or rows.max() >= known:
            raise IndexError(f"rows {rows.tolist()} are not all among the {known} tentative rows")
        places = self.positions[0, self.lengths[0] + rows]
        if places[0] < self.next_position or (np.diff(places) <= 0).any():
            raise IndexError(f"rows at positions {places.tolist()} do not ascend from {self.next_position} on")

    def _gather(self, layers: list[int], start: int, rows: np.ndarray) -> None:
        """Make these tentative rows the content after `start` in layers that are alike."""
        m = len(rows)
        if (rows != np.arange(m)).any():
            index = torch.from_numpy(rows).to(self.data.device, non_blocking=True)
            slots = self.data[:, :, :, start : start + self.scratch]
            # index_select makes a copy first, so overlapping source and target slots are safe.
            if len(layers) == len(slots):
                slots[:, :, :, :m] = slots.index_select(3, index)
            else:
                slots[layers, :, :, :m] = slots[layers].index_select(3, index)
            self.positions[layers, start : start + m] = self.positions[layers][:, start + rows]
        self.lengths[layers] += m

    def _cut(self, layer: int, length: int) -> None:
        """Forget the slots of one layer from `length` on, and the marks that counted on them."""
        self.lengths[layer] = length
        for mark in [mark for mark in self._marks if mark.lengths[layer] > length]:
            self._marks.discard(mark)

    def _forget(self) -> None:
        """No row is tentative any more."""
        self.scratch = self.stays = 0
        self.written[:] = 0

    def _replace(self, capacity: int) -> None:
        """Move the content to storage of its own with room for `capacity` slots."""
        old = self.data
        self.move(_allocate((*old.shape[:3], capacity, old.shape[4]), old.dtype, old.device))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        size = np.prod(shape, dtype=np.float64) * dtype.itemsize / 2**30
        raise OutOfMemory(
            f"no memory for a key-value cache of {shape[3]} tokens ({size:.1f} GiB): "
            "use a shorter prompt or fewer sequences at once"
        ) from error
