"""One sequence's keys and values: content that counts, and tentative rows of passes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self
from weakref import WeakSet

import numpy as np
import torch

from decodery.core.mapped_memory import discards

from .account import resident
from .attention_policy import AttentionPolicy
from .cross_memory import CrossMemory
from .evicted_slots import Losses
from .known_states import States
from .page_pool import SLOTS, MappedPool
from .pages import PageTable
from .row_store import RowStore
from .slot_positions import SlotPositions

_TO_COME = 256
"""Rows that a kernel appends at least before tables move."""
_BEHIND = 256
"""Positions after all windows that stay, and at least so many more go at a time."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What was content of a cache at some moment.

    Attributes:
        lengths: [layers].
    """

    lengths: np.ndarray
    next_position: int


class KVCache:
    """Keys and values of one sequence, per layer, with a length per layer and the position of every slot.

    Slots [0, length) are content in ascending position order; passes write their rows after them, tentatively, and
    `keep` decides which of these become content. Pages are taken when rows are to be written, for `capacity` slots at
    least, and for all that is `expect`ed. Forks share pages, and copy only those that they write to.

    Args:
        layers, kv_heads, head_dim: Its sizes.
        dtype: What keys and values are held in; torch.int8 is integers with a scale for each row
            (`models.cache.coded`).
        device: Where it lies.
        capacity: Slots that are reserved at first.
        window: How many positions back the rows of layers `windowed` see; None where every row may see all of them.
        windowed: Layers that the window holds for.
        prefix: How many of the first slots belong to no token, but to a learned past at positions -prefix to -1.
        tentative: How many tentative rows there are.
        retained: How many of them the pass in progress found here.
        written: [layers], how many of them, from the first on, each layer has been given.
        policy: What decides which slots attention reads, None for all that a row sees.
        losses: Content that only some heads still hold.
        memory: What is remembered of a source that the text is written with in view, where there is one; cutting the
            text leaves it in place.
        memory_bytes: Bytes of that once it is made, 0 where nothing is known of it.
        states: What layers that keep no keys and values have made of their slots.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int = 0,
        window: int | None = None,
        windowed: Sequence[int] = (),
    ) -> None:
        # Elsewhere other texts take what a text gives back.
        self.window = window if discards() or torch.device(device).type != "cpu" else None
        self.store = RowStore((layers, kv_heads, head_dim), dtype, device, () if self.window is None else windowed)
        self.lengths = np.zeros(layers, dtype=np.int64)
        self.slot_positions = SlotPositions(layers)
        self.next_position = 0
        self.prefix = 0
        self.tentative = 0
        self.retained = 0
        self.written = np.zeros(layers, dtype=np.int64)
        self.policy: AttentionPolicy | None = None
        self.memory: CrossMemory | None = None
        self.memory_bytes = 0
        self.states = States()
        self._snapshots: WeakSet[Snapshot] = WeakSet()
        self._first = capacity
        self._expected = 0

    @property
    def data(self) -> torch.Tensor:
        """A copy of all slots: [layers, 2 (keys, values), kv_heads, capacity, head_dim]."""
        return self.store.numbers(self.pages.read(0, self.capacity))

    @property
    def pages(self) -> PageTable:
        """The pages that it holds."""
        return self.store.pages

    @property
    def losses(self) -> Losses:
        """Content that only some heads still hold."""
        return self.store.losses

    @property
    def coded(self) -> bool:
        """Whether it holds bytes, a row's scale after its numbers."""
        return self.store.coded

    @property
    def positions(self) -> np.ndarray:
        """[layers, slots] positions of all slots, to be read only."""
        return self.slot_positions.every

    @property
    def capacity(self) -> int:
        return self.pages.capacity

    @property
    def bytes(self) -> int:
        """Bytes of memory that would be free without this cache and all that share pages with it."""
        return resident([self])

    @property
    def length(self) -> int:
        """Slots that hold content; the largest over the layers where eviction made them differ."""
        return int(self.lengths.max())

    @property
    def evicted(self) -> bool:
        """Whether some layer, or some head of one, no longer holds every position from 0 on."""
        return bool(self.losses) or bool((self.lengths != self.prefix + self.next_position).any())

    @property
    def evicted_apart(self) -> bool:
        """Whether layers hold different slots, or heads of one layer do."""
        return bool(self.losses) or len(set(self.lengths.tolist())) > 1

    @property
    def plain(self) -> bool:
        """Whether it is what reading its tokens makes: nothing was evicted, and no policy says what is read."""
        return self.policy is None and not self.evicted

    def begins(self, n: int) -> bool:
        """Whether it holds those that it has read of its first n tokens as any text that begins so does."""
        return n >= self._reach and not self.evicted and (self.policy is None or self.policy.untouched >= n)

    @property
    def untouched(self) -> int:
        """How many of the tokens it has read it holds as any text that begins so does."""
        known = self.next_position if self.policy is None else min(self.policy.untouched, self.next_position)
        return 0 if self.evicted or known < self._reach else known

    def takes(self, n: int) -> int:
        """How many of a text's first n tokens it may take from another text before it has read any."""
        return n if self.policy is None else min(self.policy.untouched, n)

    @property
    def anew(self) -> bool:
        """Whether reading its tokens once more makes the same of them."""
        return self.plain if self.policy is None else self.policy.anew

    def beginning(self, n: int) -> Self:
        """A fork without a policy, of the first n tokens.

        Of none where it does not `begins(n)` for its windows.
        """
        clone = self.fork()
        clone.policy = None
        clone.truncate(n)
        return clone

    @property
    def head_lengths(self) -> np.ndarray:
        """[layers, kv_heads] slots that each head still holds."""
        return self.store.head_lengths(self.lengths)

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values that one slot takes in all layers."""
        return self.pages.slot_bytes

    def room_for(self, tokens: int) -> int:
        """Slots that memory is taken for when a text of so many tokens is read."""
        return -(-max(self._slots_of(tokens), self.capacity, self._first) // SLOTS) * SLOTS

    def more_for(self, tokens: int, rows: int = 1, chunk: int | None = None) -> int:
        """Bytes that have yet to be taken, copies of shared pages included.

        Args:
            tokens: How many the text has.
            rows: The most that are tentative at once after its prompt.
            chunk: The most of its prompt that are, None for no bound.
        """
        ends = self.store.ends(self.lengths)
        slots = self.room_for(tokens)
        # Where content is evicted, pages that are shared with others are copied.
        evicts = self.policy is not None and (self.policy.most is not None or not self.policy.anew)
        pages = self.pages.wanting(np.zeros_like(ends) if evicts else ends, ends + max(slots - self.length, 0))
        chunk = tokens if chunk is None else chunk
        beside = 0 if self.policy is None else self.policy.more_for(self, slots, rows, chunk)
        source = 0 if self.memory is not None else self.memory_bytes
        return pages * self.pages.pool.page_bytes + beside + self.states.due + source

    def expect(self, tokens: int) -> None:
        """Take memory at once for all that is to be read.

        Args:
            tokens: How many the text has, read or not.
        """
        self._expected = self._slots_of(tokens)

    def _slots_of(self, tokens: int) -> int:
        """How many slots so many tokens of its text take."""
        slots, most = tokens - self.next_position + self.length, None if self.policy is None else self.policy.most
        return slots if most is None else min(slots, most)

    def provide(self, slots: int) -> None:
        """Have pages for `slots` tokens and for no more, or for the content if that is more."""
        first = slots + self.prefix
        if self.capacity:
            ends = self.store.ends(self.lengths) + self.tentative
            spare = max(first - self.length - self.tentative, 0)
            self.pages.own(ends, ends + spare)
            self.pages.trim(ends + spare)
        self._first = first

    def prepend(self, data: torch.Tensor) -> None:
        """Put keys and values that belong to no token before an empty cache's text.

        They are [layers, 2, kv_heads, n, head_dim]. Keys are as attention uses them. The text still begins at position
        0, and cutting it leaves them in place.
        """
        if self.length or self.prefix:
            raise ValueError("only a cache that holds nothing can be given a prefix")
        n = data.shape[3]
        self.pages.own(self.lengths, self.lengths + n)
        self.pages.put(0, self.store.elements(data).to(self.pages.nothing.dtype))
        self.slot_positions.begin(np.arange(-n, 0, dtype=np.int32))
        self.lengths += n
        self.prefix = n
        self._first += n

    def reserve(self, positions: np.ndarray, retained: int = 0, layers: Sequence[int] | None = None) -> None:
        """Make room, owned by this cache alone, for tentative rows at `positions` [n].

        Called once by each pass.

        Args:
            retained: How many tentative rows remain before them.
            layers: Those that the pass gives keys and values, None for all; the others keep theirs as far as the new
                rows stand at the same positions, so that a pass can begin with the hidden states that an earlier one
                left these rows with.
        """
        if retained and not 0 <= retained <= (known := int(self._known(layers).min(initial=self.tentative))):
            raise IndexError(f"{retained} rows cannot stay where there are {known} tentative ones")
        n = retained + len(positions)
        # The first rows come with all that is expected; of shorter layers as much less.
        room = max(n, max(self._expected, self._first) - self.length)
        ends = self.store.ends(self.lengths)
        self.pages.own(ends + retained, ends + room)
        same = retained if layers is None else self._same(positions, retained)
        self.slot_positions.put(self.lengths, retained, positions, self.capacity)
        self.tentative, self.retained = n, retained
        self.states.tentative = None
        np.minimum(self.written, same, out=self.written)
        if layers is not None:
            these = np.asarray(layers, dtype=np.int64)
            self.written[these] = np.minimum(self.written[these], retained)

    def make_room(self, rows: int) -> None:
        """Make room, owned by this cache alone, for `rows` rows after the content.

        Also for all that is expected. Nothing is tentative then: a kernel appends rows by itself, see `OpenRows`.
        """
        room = max(rows, max(self._expected, self._first) - self.length)
        self.pages.own(self.lengths, self.lengths + room)
        # Kernels need not be told of other tables soon.
        most = self.length + room + _TO_COME
        self.pages.widen(-(-most // SLOTS))
        self.slot_positions.widen(most, 0)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values of a pass's rows, each [n, kv_heads, head_dim], of one layer.

        Args:
            layer: The layer's number.
            keys, values: [n, kv_heads, head_dim].
        """
        own = keys.transpose(0, 1), values.transpose(0, 1)
        self.store.put(layer, int(self.lengths[layer]), self.retained, *own)
        self.written[layer] = self.tentative

    def wrote(self, layers: Sequence[int]) -> None:
        """A pass has put the keys and values of its rows into these layers by itself, not by `write`."""
        self.written[np.asarray(layers, dtype=np.int64)] = self.tentative

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of keys and values with tentative rows, [kv_heads, length + tentative, head_dim] each."""
        both = self.store.numbers(self.stored(layer))
        return both[0], both[1]

    def stored(self, layer: int) -> torch.Tensor:
        """The same as it is stored, both in one [2, kv_heads, length + tentative, elements of a row]."""
        return self.store.read(layer, int(self.lengths[layer]), self.tentative)

    def keep(self, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        """Turn these tentative rows into content, in this order, and forget the others.

        Rows are counted from the first one that stayed, and must ascend in position.

        Args:
            rows: Numbers of tentative rows.
            layers: Which of them keep the rows; None: every layer keeps those that it has been given, which after a
                pass through some layers may be none.
        """
        picked = list(rows)
        if picked:
            self.next_position = max(self.next_position, self._check(picked, layers) + 1)
            lengths, written = self.lengths.tolist(), self.written.tolist()
            in_place = picked == list(range(len(picked)))
            if in_place and layers is None and len(set(lengths)) == len(set(written)) == 1:
                self.lengths += len(picked)
                self.states.keep(self.lengths)
            else:
                self._sort_out(np.asarray(picked, dtype=np.int64), lengths, written, layers)
        self._forget()
        if self.policy is not None:
            self.policy.kept(self, picked, layers)

    def select(self, slots: np.ndarray) -> None:
        """Let these slots of content and tentative rows be all the content, in ascending order of position.

        For models whose rows are computed out of order, such as masked diffusion models: what is not selected is
        forgotten.

        Raises:
            ValueError: If layers differ, or where two slots hold the same position.
        """
        start, held = int(self.lengths[0]), self.tentative
        if self.evicted_apart or (held and int(self.written.min()) < held):
            raise ValueError("slots can be selected only where all layers hold the same ones")
        places = self.slot_positions.of(0)[: start + held]
        slots = slots[np.argsort(places[slots], kind="stable")]
        chosen = places[slots]
        if (chosen[1:] <= chosen[:-1]).any():
            raise ValueError("two of these slots hold the same position: select the newer one alone")
        first = int((slots[: start + held] == np.arange(len(slots))).cumprod().sum())
        if first < len(slots):
            moved = slots[first:]
            data = self.pages.take(moved)
            self.pages.own(np.full_like(self.lengths, first), np.full_like(self.lengths, len(slots)))
            self.pages.put(first, data)
            self.slot_positions.gather(list(range(len(self.lengths))), first, moved - first)
        for layer in range(len(self.lengths)):
            self._doubt(layer, min(first, start))
        self.lengths[:] = len(slots)
        self.next_position = int(chosen[-1]) + 1 if len(chosen) else 0
        self._forget()

    def snapshot(self) -> Snapshot:
        """What is content now, for `rewind` to return to, in this cache or a fork of it."""
        snapshot = Snapshot(self.lengths.copy(), self.next_position)
        self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Forget all that came after `mark`.

        Raises:
            ValueError: If some of what it marks is no longer there.
        """
        if snapshot not in self._snapshots:
            raise ValueError("what was marked has been cut or evicted since, or is another cache's: rewind before that")
        for layer, length in enumerate(snapshot.lengths):
            self._cut(layer, int(length))
        self.next_position = snapshot.next_position
        self._shorten()

    def release_passed(self) -> None:
        """Let layers with a window give back what no later row sees, some hundreds of positions at a time.

        What marks may come back to stays, and some positions more, for what is cut shortly after. Under a policy that
        leaves something else where a text is read again, all stays: a longer cut begins with nothing.
        """
        if self.window is None or self.prefix or not (self.policy is None or self.policy.anew):
            return
        least = self.pages.passed * SLOTS + 2 * _BEHIND + self.window - 1
        if self.next_position < least:
            # At nearly every step of a text.
            return
        stands = min((self.next_position, *(snapshot.next_position for snapshot in self._snapshots)))
        if stands < least or self.evicted:
            return
        self.pages.release_passed(stands - self.window + 1 - _BEHIND)

    def truncate(self, n: int) -> None:
        """Forget every slot whose position is n or later.

        Where layers with a window have given back what the next row would see, forget everything: what is left of the
        text, after `next_position`, has to be read again.
        """
        if n < self._reach:
            n = 0
            self.pages.begin_anew()
        for layer, length in enumerate(self.lengths):
            self._cut(layer, int(np.searchsorted(self.slot_positions.of(layer)[:length], n)))
        self.next_position = min(self.next_position, n)
        self._shorten()

    def fork(self) -> Self:
        """A cache with the same content; the two share pages, and each copies those it comes to write to."""
        clone = object.__new__(type(self))
        clone.window = self.window
        clone.store = self.store.fork(self.lengths)
        clone.lengths = self.lengths.copy()
        clone.slot_positions = self.slot_positions.fork(self.length)
        clone.next_position = self.next_position
        clone.prefix = self.prefix
        clone.tentative = clone.retained = 0
        clone.written = np.zeros_like(self.written)
        clone.policy = None if self.policy is None else self.policy.fork()
        clone.memory, clone.memory_bytes = self.memory, self.memory_bytes
        clone.states = self.states.fork()
        clone._snapshots = WeakSet(self._snapshots)
        clone._first, clone._expected = self._first, 0
        return clone

    def become(self, other: Self) -> None:
        """Hold what `other`, of the same kind, holds, and forget all else, marks included; `other` is used up."""
        # At once, even where other objects still hold the table of this cache's pages.
        self.pages.release()
        vars(self).clear()
        vars(self).update(vars(other))

    def evict(self, layer: int, slots: Sequence[int], heads: Sequence[int] | None = None) -> None:
        """Drop these slots of one layer; the others keep their order and their positions.

        Args:
            layer: The layer's number.
            slots: Numbers of slots.
            heads: key-value heads that lose them, None for all.
        """
        dropped = np.asarray(slots, dtype=np.int64)
        if len(dropped):
            self.pages.begin_anew()
            remaining = self.store.drop(layer, self.lengths, dropped, heads)
            self.slot_positions.part()
            self.slot_positions.gather([layer], 0, remaining)
            self.losses.gather(layer, remaining)
            self._doubt(layer, int(dropped.min()))
            self.lengths[layer] = len(remaining)
            self.pages.trim(self.store.ends(self.lengths))
        self._forget()

    def retain(self, layer: int, slots: np.ndarray) -> None:
        """Let each head of one layer hold these of its slots and no others.

        Rows move as they are stored. A slot then has the latest of its heads' positions.

        Args:
            layer: The layer's number.
            slots: [kv_heads, m] ascending.
        """
        positions = self.positions[layer, : int(self.lengths[layer])][slots].max(axis=0)
        self.pages.begin_anew()
        if self.losses:
            keys, values = self.view(layer)
            index = torch.from_numpy(slots).to(keys.device)[..., None].expand(-1, -1, keys.shape[-1])
            self.refill(layer, keys.gather(1, index), values.gather(1, index), positions)
            return
        first = self.store.pick(layer, self.lengths, slots)
        self.slot_positions.set(layer, positions)
        self._doubt(layer, first)
        self.lengths[layer] = len(positions)
        self.pages.trim(self.store.ends(self.lengths))
        self._forget()

    def lose(self, slots: np.ndarray, worths: np.ndarray, changed: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """Let heads lose some slots, as many in each head of a layer; kernels move what lies after them up.

        A slot then has the latest of its heads' positions.

        Args:
            slots: [layers, kv_heads, n] int32, ascending; those from a layer's length on stand for none.
            worths: [layers, kv_heads, slots] float64, a number for each slot, which move likewise.
            changed: Slots that hold other keys and values before that: see `MappedPool.lose`.
        """
        pool, lengths = self.pages.pool, self.lengths.copy()
        assert isinstance(pool, MappedPool)
        left = lengths - (slots < lengths[:, None, None]).sum(axis=2)[:, 0]
        firsts, stops = np.minimum(slots[:, :, 0], left[:, None]), left
        if changed is not None:
            # A number below 0 is the largest one without a sign.
            firsts, stops = np.minimum(firsts, changed[0].view(np.uint32).min(axis=2)), lengths
        self.pages.begin_anew()
        self.pages.own(firsts, np.broadcast_to(stops[:, None], firsts.shape))
        self.slot_positions.part()
        pool.lose(self.pages.whole_table, slots, lengths, self.slot_positions.held, worths, changed)
        for layer in np.flatnonzero(left < lengths).tolist():
            self._doubt(layer, int(firsts[layer].min()))
        self.lengths[:] = left
        pages = -(-left // SLOTS)
        if self.capacity > int(pages.max()) * SLOTS or (pages < -(-lengths // SLOTS)).any():
            self.pages.trim(self.store.ends(self.lengths))
        self._forget()

    def refill(self, layer: int, keys: torch.Tensor, values: torch.Tensor, positions: np.ndarray) -> None:
        """Let one layer hold these keys and values [kv_heads, m, head_dim] and no others, of all heads alike.

        m may not exceed what the layer holds.

        Args:
            layer: The layer's number.
            keys, values: [kv_heads, m, head_dim].
            positions: [m] ascending, of the slots; where heads hold rows of different positions in one slot, the latest
                of them.
        """
        m = len(positions)
        if m > int(self.lengths[layer]):
            raise ValueError(f"a layer that holds {self.lengths[layer]} slots cannot be refilled with {m}")
        self.pages.begin_anew()
        self.store.own(layer, self.lengths, 0, m)
        self.losses.cut(layer, 0)
        self.store.put(layer, 0, 0, keys, values)
        self.slot_positions.set(layer, positions)
        self._doubt(layer, 0)
        self.lengths[layer] = m
        self.pages.trim(self.store.ends(self.lengths))
        self._forget()

    def shrink(self, spare: int) -> None:
        """Give back the memory after the content but that of `spare` slots."""
        self._forget()
        self._first = min(self._first, self.length + spare)
        self.pages.trim(self.store.ends(self.lengths) + spare)

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """What is read of these [..., head_dim] once the cache holds them, in their own precision."""
        return self.store.numbers(self.store.elements(numbers).to(self.pages.nothing.dtype)).to(numbers.dtype)

    @property
    def _reach(self) -> int:
        """The first position at which a row sees all that it should, if it was the next one."""
        passed = self.pages.passed * SLOTS
        return passed + self.window - 1 if passed and self.window is not None else 0

    def _known(self, layers: Sequence[int] | None) -> np.ndarray:
        """How many tentative rows each of these layers has been given."""
        return self.written if layers is None else self.written[np.asarray(layers, dtype=np.int64)]

    def _check(self, rows: list[int], layers: Sequence[int] | None) -> int:
        """The position of the last of rows that may become content: written, and ascending after it."""
        known = self.written.max() if layers is None else self._known(layers).min()
        if min(rows) < 0 or max(rows) >= known:
            raise IndexError(f"rows {rows} are not all among the {known} tentative rows")
        # Layers that are told apart may lag after others, and ascend on their own.
        layer, first = (0, self.next_position) if layers is None else (layers[0], self._end(layers[0]))
        start = int(self.lengths[layer])
        held = self.slot_positions.of(layer)[start : start + max(rows) + 1].tolist()
        places = [held[row] for row in rows]
        if places[0] < first or any(after <= before for before, after in pairwise(places)):
            raise IndexError(f"rows at positions {places} do not ascend from {first} on")
        last: int = places[-1]
        return last

    def _end(self, layer: int) -> int:
        """The position after the content of one layer."""
        length = int(self.lengths[layer])
        return int(self.slot_positions.of(layer)[length - 1]) + 1 if length else 0

    def _sort_out(self, rows: np.ndarray, lengths: list[int], written: list[int], layers: Sequence[int] | None) -> None:
        """Make content of these rows in layers that differ, or not in the order in which they lie."""
        alike: dict[tuple[int, int], list[int]] = {}
        for layer in range(len(lengths)) if layers is None else layers:
            alike.setdefault((lengths[layer], written[layer]), []).append(layer)
        if len(alike) > 1:
            self.slot_positions.part()
        for (start, given), those in alike.items():
            self._gather(those, start, rows[rows < given])

    def _gather(self, layers: list[int], start: int, rows: np.ndarray) -> None:
        """Make these tentative rows the content after `start` in layers that are alike."""
        m = len(rows)
        moved = np.flatnonzero(rows != np.arange(m))
        if len(moved):
            self.store.gather(layers, start, rows, int(moved[0]))
            self.slot_positions.gather(layers, start, rows)
        self.lengths[layers] += m

    def _same(self, positions: np.ndarray, retained: int) -> int:
        """How many tentative rows stand where they stood before a pass over rows at `positions`."""
        start = int(self.lengths[0])
        before = self.slot_positions.of(0)[start + retained : start + self.tentative]
        n = min(len(before), len(positions))
        other = np.flatnonzero(before[:n] != positions[:n])
        return retained + (int(other[0]) if len(other) else n)

    def _cut(self, layer: int, length: int) -> None:
        """Forget the slots of one layer from `length` on, and the marks that counted on them."""
        self.lengths[layer] = length
        self.losses.cut(layer, length)
        self._doubt(layer, length)

    def _doubt(self, layer: int, length: int) -> None:
        """Forget the marks and states that counted on more than the first slots of a layer."""
        self.states.doubt(layer, length)
        for snapshot in [snapshot for snapshot in self._snapshots if snapshot.lengths[layer] > length]:
            self._snapshots.discard(snapshot)

    def _shorten(self) -> None:
        """Some content was forgotten, and all that was tentative."""
        self._forget()
        if self.policy is not None:
            self.policy.cut(self)

    def _forget(self) -> None:
        """No row is tentative any more."""
        self.states.tentative = None
        self.tentative = self.retained = 0
        self.written[:] = 0
