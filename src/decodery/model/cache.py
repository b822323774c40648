"""One sequence's keys and values: content that counts, and tentative rows of passes behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from ..errors import OutOfMemory


class Storage:
    """The tensor behind one or more caches, and how many of them share it. Whoever replaces `data` copies all slots."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.owners = 1


class KVCache:
    """Keys and values of one sequence, per layer, with a length per layer and the position of every slot.

    data: [layers, 2 (keys, values), kv_heads, capacity, head_dim]. Slots [0, length) are content in ascending
    position order; passes write their rows behind them, tentatively, and `keep` decides which of these become content.
    Memory is taken when the first rows are written, for `capacity` slots or more; from then on capacity doubles, so
    growing costs no copy per token. Forks share storage until one of them writes.
    prefix: how many of the first slots belong to no token, but to a learned past at positions -prefix to -1.
    scratch: how many tentative rows there are. stays: how many of them the pass in progress found here.
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
        self.counts: Counter[str] = Counter()
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

    def reserve(self, positions: np.ndarray, stays: int = 0) -> None:
        """Make room, owned by this cache alone, for tentative rows at `positions` [n]. Called once by each pass.

        stays: how many tentative rows remain before them.
        """
        if not 0 <= stays <= self.scratch:
            raise IndexError(f"{stays} rows cannot stay where there are {self.scratch} tentative ones")
        n, starts = stays + len(positions), set(self.lengths.tolist())
        needed = max(starts) + n
        if needed > self.capacity:
            self._replace(max(needed, 2 * self.capacity, self._first))
        elif self.storage.owners > 1:
            self._replace(self.capacity)
        self.scratch, self.stays = n, stays
        for start in starts:
            layers = slice(None) if len(starts) == 1 else self.lengths == start
            self.positions[layers, start + stays : start + n] = positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values of a pass's rows, each [n, kv_heads, head_dim], of one layer."""
        start = int(self.lengths[layer])
        slots = self.data[layer, :, :, start + self.stays : start + self.scratch]
        slots[0].copy_(keys.transpose(0, 1))
        slots[1].copy_(values.transpose(0, 1))

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of content and tentative rows, [kv_heads, length + scratch, head_dim] each, not copied."""
        stop = int(self.lengths[layer]) + self.scratch
        both = self.data[layer, :, :, :stop]
        return both[0], both[1]

    def keep(self, rows: Sequence[int]) -> None:
        """Turn these tentative rows (ascending positions) into content, in this order, and forget the others.

        They are counted from the first one that stayed.
        """
        if any(not 0 <= row < self.scratch for row in rows):
            raise IndexError(f"rows {list(rows)} are not all among the {self.scratch} tentative rows")
        m = len(rows)
        if m and list(rows) != list(range(m)):
            index = torch.as_tensor(rows).to(self.data.device, non_blocking=True)
            for start in np.unique(self.lengths):
                layers = self.lengths == start
                data = self.data if layers.all() else self.data[torch.from_numpy(np.flatnonzero(layers))]
                # index_select makes a copy first, so overlapping source and target slots are safe.
                picked = data[:, :, :, start : start + self.scratch].index_select(3, index)
                if layers.all():
                    data[:, :, :, start : start + m] = picked
                else:
                    self.data[torch.from_numpy(np.flatnonzero(layers)), :, :, start : start + m] = picked
                self.positions[layers, start : start + m] = self.positions[layers][:, start + np.asarray(rows)]
        if m:
            first = int(self.lengths[0])
            self.next_position = int(self.positions[0, first + m - 1]) + 1
            self.lengths += m
        self.scratch = self.stays = 0

    def truncate(self, n: int) -> None:
        """Forget every slot whose position is n or later."""
        for layer, length in enumerate(self.lengths):
            self.lengths[layer] = np.searchsorted(self.positions[layer, :length], n)
        self.next_position = min(self.next_position, n)
        self.scratch = self.stays = 0

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
        twin.counts = Counter()
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
        self.lengths[layer] = len(remaining)
        self.scratch = self.stays = 0

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
