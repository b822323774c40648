"""Where keys and values lie: blocks of slots that forks share, and copy only where they write.

A slab is one tensor, cut into blocks of `SLOTS` slots. A text holds runs of neighbouring blocks, so that attention
reads a text that was never forked as one piece, and a forked one as the shared piece and a tail of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from decodery.core.errors import OutOfMemory

from .page_memory import SLOTS, PageMemory

_SPARE = 16
"""A piece that grows has room for one slot in so many more than it is asked for."""
_LEAST_SPARE = 64
"""Slots that a text's only piece grows by at least."""

_names = itertools.count(1)


@dataclass(slots=True)
class PageRun:
    """Neighbouring blocks [first, last) of a slab, in the order of the text that holds them."""

    memory: PageMemory
    first: int
    last: int

    @property
    def slots(self) -> int:
        return min(self.last * SLOTS, self.memory.data.shape[3]) - self.first * SLOTS

    @property
    def holders(self) -> np.ndarray:
        return self.memory.holders[self.first : self.last]


class PageTable:
    """The slots of one text, logically one after another.

    Memory comes when slots are to be written for the first time. A text whose blocks are not shared stays in one piece,
    which grows by `_LEAST_SPARE` slots, or by a `_SPARE`th where that is more. One that shares its beginning has the
    rest in one piece of its own, which grows by a block, or by a `_SPARE`th: many forks hold little more than they have
    written, and growing copies less than a `_SPARE`th of what attention reads meanwhile. `room` tells before what it
    takes.

    Args:
        windowed: Layers whose rows stop seeing old slots.
        passed: How many of the first blocks they no longer read; what is in these layers there is gone once that holds
            for all texts that hold the block.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, windowed: Sequence[int] = ()
    ) -> None:
        """A cache of no slots.

        Args:
            shape: Layers, kv_heads, elements of a row: head_dim, and more where rows are coded.
        """
        layers, kv_heads, head_dim = shape
        self.windowed, self.passed = tuple(windowed), 0
        self.nothing = torch.empty((layers, 2, kv_heads, 0, head_dim), dtype=dtype, device=device)
        self.runs: list[PageRun] = []
        self._name = next(_names)
        self._mine = 0, 0  # slots known to be this text's to write

    @property
    def written_from(self) -> tuple[int, int]:
        """Slots that are known to be this text's to write: another tuple once that may have changed."""
        return self._mine

    @property
    def capacity(self) -> int:
        return sum(run.slots for run in self.runs)

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values that one slot takes in all layers."""
        layers, both, kv_heads, _, head_dim = self.nothing.shape
        return layers * both * kv_heads * head_dim * self.nothing.itemsize

    @property
    def home(self) -> PageMemory | None:
        """The slab that is all this text's, and all of it, where there is one."""
        if len(self.runs) != 1 or len(self.runs[0].holders) != len(self.runs[0].memory.holders):
            return None
        return self.runs[0].memory if (self.runs[0].holders == 1).all() else None

    def pieces(self, start: int, stop: int, layers: int | slice = slice(None)) -> Iterator[torch.Tensor]:
        """Slots [start, stop) of some layers in order, as views [layers, 2, kv_heads, n, head_dim]."""
        for run in self.runs:
            if stop <= 0:
                return
            slots, at = run.slots, run.first * SLOTS
            if start < slots:
                yield run.memory.data[layers, :, :, at + max(start, 0) : at + min(stop, slots)]
            start, stop = start - slots, stop - slots

    def read(self, start: int, stop: int, layers: int | slice = slice(None)) -> torch.Tensor:
        """Slots [start, stop): [layers, 2, kv_heads, n, head_dim], a view where they lie in one piece."""
        found = list(self.pieces(start, stop, layers))
        if len(found) == 1:
            return found[0]
        return torch.cat(found, dim=-2) if found else self.nothing[layers]

    def take(self, start: int, stop: int, rows: np.ndarray) -> torch.Tensor:
        """Copies of these slots of [start, stop), counted from `start`: [layers, 2, kv_heads, m, head_dim]."""
        slots = self.read(start, stop)
        return slots.index_select(3, torch.from_numpy(rows).to(slots.device, non_blocking=True))

    def put(self, layers: list[int], start: int, data: torch.Tensor) -> None:
        """Write `data` [all layers, 2, kv_heads, m, head_dim] to the slots of these layers from `start` on."""
        done, every = 0, len(layers) == len(self.nothing)
        for slots in self.pieces(start, start + data.shape[3]):
            part = data[:, :, :, done : done + slots.shape[3]]
            if every:
                slots.copy_(part)
            else:
                slots[layers] = part[layers]
            done += slots.shape[3]

    def room(self, start: int, stop: int, least: int, most: int | None = None) -> int:
        """The capacity once slots [start, stop) are there, as `own` takes memory for them.

        Args:
            start: the first slot that is to be written.
            stop: the slot after the last one.
            least: slots of a text's only piece at least.
            most: slots that the text will ever have; it is given no more than these, unless it has more already.

        Returns:
            Slots.
        """
        return self._planned(stop, least, most, *self._find(start))[1] if stop > self.capacity else self.capacity

    def own(self, start: int, stop: int, held: int, least: int, most: int | None = None) -> None:
        """Let slots [start, stop) be there, and this text's alone to write.

        Where there is no memory nothing changes.

        Args:
            held: How many slots hold something.
            least, most: See `room`.
        """
        if start >= stop or (self._mine[0] <= start and stop <= self._mine[1]):
            return
        self._extend(stop)
        blocks, shared = self._find(start)
        if stop > min(blocks * SLOTS, self.capacity):
            first, room = self._planned(max(stop, held), least, most, blocks, shared)
            if first is None:
                self.replace(room, held)
            else:
                self._append(first, room - first, held)
            blocks = -(-self.capacity // SLOTS)
        self._mine = start, min(blocks * SLOTS, self.capacity)

    def replace(self, slots: int, held: int) -> None:
        """Move the first `held` slots to memory of their own with room for exactly `slots`."""
        self.move(_allocate(self.nothing, slots), held)

    def move(self, data: torch.Tensor, held: int) -> None:
        """Move the first `held` slots to `data` [layers, 2, kv_heads, slots, head_dim], its memory from now."""
        self._copy(0, held, data)
        self.release()
        self.runs, self._mine = [self._hold(data, 0)], (0, data.shape[3])

    def fork(self, length: int) -> PageTable:
        """A text that shares the first `length` slots."""
        clone = object.__new__(PageTable)
        clone.nothing, clone.runs, clone._name = self.nothing, [], next(_names)
        clone.windowed, clone.passed = self.windowed, min(self.passed, -(-length // SLOTS))
        clone._mine = self._mine = 0, 0
        for run in self.runs:
            if length <= 0:
                break
            memory, last = run.memory, min(run.last, run.first - (-length // SLOTS))
            blocks = slice(run.first, last)
            given = np.minimum(length - SLOTS * np.arange(last - run.first), SLOTS)
            shared = memory.holders[blocks] > 1
            memory.writer[blocks] = np.where(shared, memory.writer[blocks], self._name)
            memory.frozen[blocks] = np.maximum(np.where(shared, memory.frozen[blocks], 0), given)
            memory.holders[blocks] += 1
            clone.runs.append(PageRun(memory, run.first, last))
            length -= run.slots
        for memory, first, last in clone._numbered(clone.passed):
            memory.need(first, last)
        return clone

    def release(self) -> None:
        """Hold nothing any more."""
        for run in self.runs:
            run.holders[:] -= 1
        for memory, first, last in self._numbered(self.passed):
            memory.release_passed(first, last)
        self.runs = []

    def release_passed(self, slot: int) -> None:
        """Free what windowed layers no longer read, before `slot`, to within a block.

        What others read stays.
        """
        last = max(slot // SLOTS, self.passed)
        for memory, begin, end in self._numbered(self.passed, last):
            memory.release_passed(begin, end)
        self.passed = last

    def begin_anew(self) -> None:
        """All slots will be written again, so that windowed layers need all of them."""
        for memory, begin, end in self._numbered(0, self.passed):
            memory.need(begin, end)
        self.passed = 0

    def _extend(self, stop: int) -> None:
        """Take blocks after the last one that are not held any more, as far as slot `stop`."""
        wanted = -(-(stop - self.capacity) // SLOTS)
        if wanted <= 0 or not self.runs or self.runs[-1].slots % SLOTS:
            return
        run = self.runs[-1]
        behind = run.memory.holders[run.last : run.last + wanted]
        taken = np.flatnonzero(behind)
        behind = behind[: taken[0]] if len(taken) else behind
        behind[:] = 1
        run.memory.need(run.last, run.last + len(behind))
        run.last += len(behind)

    def _planned(self, stop: int, least: int, most: int | None, blocks: int, shared: int) -> tuple[int | None, int]:
        """From which slot on memory is taken anew so that there are `stop` slots, and how many there are then.

        The slot is None where the text's only piece is. blocks, shared: see `_find`.
        """
        if shared:
            # A short last block, which no other can follow, is made anew.
            first = min(blocks, shared, self.capacity // SLOTS) * SLOTS
            room = _within(stop, stop + (stop - first) // _SPARE, most)
            return first, first - (first - room) // SLOTS * SLOTS
        grown = self.capacity + max(self.capacity // _SPARE, _LEAST_SPARE) if 0 < self.capacity < stop else 0
        return None, _within(max(stop, least, self.capacity), grown, most)

    def _find(self, start: int) -> tuple[int, int]:
        """How many blocks there are up to the first that may not be written to, of those from slot `start` on.

        Also how many up to the last one of these that others hold as well.
        """
        blocks = shared = 0
        for run in self.runs:
            memory, these = run.memory, slice(run.first, run.last)
            begins = np.maximum(start - (blocks + np.arange(run.last - run.first)) * SLOTS, 0)
            filling = (memory.writer[these] == self._name) & (begins >= memory.frozen[these])
            others = run.holders > 1
            not_mine = np.flatnonzero(others & ~filling & (begins < SLOTS))
            count = int(not_mine[0]) if len(not_mine) else len(begins)
            last = np.flatnonzero(others[:count])
            shared = blocks + int(last[-1]) + 1 if len(last) else shared
            blocks += count
            if len(not_mine):
                break
        return blocks, shared

    def _append(self, first: int, slots: int, held: int) -> None:
        """Put a slab with room for `slots`, of whole blocks, in the place of all blocks from slot `first` on."""
        data = _allocate(self.nothing, slots)
        self._copy(first, max(held, first), data)
        dropped = list(self._numbered(max(first // SLOTS, self.passed)))
        before, behind = [], 0
        for run in self.runs:
            last = min(run.last, run.first + max(first - behind, 0) // SLOTS)
            behind += run.slots
            run.memory.holders[last : run.last] -= 1
            if last > run.first:
                before.append(PageRun(run.memory, run.first, last))
        for memory, begin, end in dropped:
            memory.release_passed(begin, end)
        self.runs = [*before, self._hold(data, first // SLOTS)]

    def _copy(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy slots [start, stop) to the first ones of `data`, but for what windowed layers no longer read."""
        gone = min(max(self.passed * SLOTS - start, 0), stop - start)
        data[:, :, :, gone : stop - start] = self.read(start + gone, stop)
        for layer in range(len(data) if gone else 0):
            # Hidden slots weigh nothing, but new memory may hold NaN, which nothing times does not take away.
            data[layer, :, :, :gone] = 0 if layer in self.windowed else self.read(start, start + gone, layer)

    def _hold(self, data: torch.Tensor, block: int) -> PageRun:
        """A stretch of its own, whose first block is this one of the text."""
        memory = PageMemory(data, self.windowed)
        memory.holders[:], memory.writer[:] = 1, self._name
        memory.need(0, len(memory.holders))
        memory.release_passed(0, max(self.passed - block, 0))
        return PageRun(memory, 0, len(memory.holders))

    def _numbered(self, first: int, last: int | None = None) -> Iterator[tuple[PageMemory, int, int]]:
        """Where blocks [first, last) of a text that has layers with a window lie: in a slab, from one to another."""
        begin = 0
        for run in self.runs if self.windowed else ():
            count = run.last - run.first
            start = max(first - begin, 0)
            stop = count if last is None else min(last - begin, count)
            if start < stop:
                yield run.memory, run.first + start, run.first + stop
            begin += count

    def __del__(self) -> None:
        # Blocks that nobody else holds any more may be written without a copy.
        if hasattr(self, "runs"):
            self.release()


def resident(texts: Iterable[PageTable], memories: Mapping[int, PageMemory] = MappingProxyType({})) -> int:
    """Bytes that these texts keep in memory together; each memory counts once and whole.

    Args:
        texts: Page tables of the texts.
        memories: Others that count as well, by identity.
    """
    held = {id(run.memory): run.memory.bytes for text in texts for run in text.runs}
    return sum(held.values()) + sum(memory.bytes for key, memory in memories.items() if key not in held)


def _within(slots: int, wished: int, most: int | None) -> int:
    """As many as are wished, but no more than `most`, and `slots` in any case."""
    return max(slots, wished if most is None else min(wished, most))


def _allocate(like: torch.Tensor, slots: int) -> torch.Tensor:
    layers, both, kv_heads, _, head_dim = like.shape
    try:
        return like.new_empty((layers, both, kv_heads, slots, head_dim))
    except (RuntimeError, MemoryError) as error:
        size = layers * both * kv_heads * head_dim * like.itemsize * slots / 2**30
        raise OutOfMemory(
            f"no memory for a key-value cache of {slots} tokens ({size:.1f} GiB): "
            "use a shorter prompt or fewer sequences at once"
        ) from error
