"""What native kernels do by themselves for the policy of a cache: windows, selection of slots, and sums of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodery.core.native.kernels import address
from decodery.core.native.structs import PolicyStruct, SealedGroupsStruct

from ..layer_plan import LayerStep
from .attention_policy import PAID_UNIT, AttentionPolicy
from .eviction import Eviction
from .page_pool import SLOTS, MappedPool
from .pages import PageTable

if TYPE_CHECKING:
    from ..batch import Segment
    from ..config import ModelConfig
    from .cache import KVCache


class SideStore:
    """What pages or slots of a text are chosen by, in pages that csrc/select.h lays out.

    Forks share it, and it counts as keys and values do.

    Attributes:
        pages: Where it lies.
        layers: [layers] bool, those that have one.
        summarised: [layers] int32, for how many of the first pages of the text it is there.
    """

    def __init__(self, pages: PageTable, per_page: int, layers: np.ndarray) -> None:
        """Begin with nothing.

        Args:
            pages: An empty table.
            per_page: Slots of it for each page of the text.
            layers: [layers] bool, those that have one.
        """
        self.pages, self.layers, self._per_page = pages, layers, per_page
        self.summarised = np.zeros(len(layers), dtype=np.int32)

    @classmethod
    def of_bounds(cls, layers: np.ndarray, kv_heads: int, head_dim: int) -> SideStore:
        """The least and the largest number of each channel of a page's keys."""
        return cls(PageTable((len(layers), kv_heads, head_dim), torch.float32, "cpu"), 1, layers)

    @classmethod
    def of_labels(cls, layers: np.ndarray, kv_heads: int, channels: int, bits: int) -> SideStore:
        """Some channels of each key, in `bits` bits."""
        # Two rows of a slot have room for its labels and their range.
        row = 2 * channels if bits == 0 else -(-(channels + 8) // 2)
        return cls(PageTable((len(layers), kv_heads, row), torch.uint8, "cpu"), SLOTS, layers)

    def cover(self, pages: int) -> None:
        """Have room, this text's alone to write, for so many of its first pages."""
        if int(self.summarised[self.layers].min(initial=pages)) < pages:
            self.pages.own(*self._span(pages))

    def more_for(self, pages: int) -> int:
        """Bytes that `cover` would take."""
        return self.pages.wanting(*self._span(pages)) * self.pages.pool.page_bytes

    def _span(self, pages: int) -> tuple[np.ndarray, np.ndarray]:
        """[layers] slots that are not there yet, from the first to the last."""
        stops = np.where(self.layers, pages, 0)
        return np.minimum(self.summarised, stops) * self._per_page, stops * self._per_page

    def cut(self, pages: int) -> None:
        """The text has no more full pages than this."""
        np.minimum(self.summarised, pages, out=self.summarised)

    def fork(self) -> SideStore:
        """A store that shares pages with this one."""
        clone = SideStore(self.pages.fork(self.summarised * np.int64(self._per_page)), self._per_page, self.layers)
        clone.summarised = self.summarised.copy()
        return clone


@dataclass(frozen=True, eq=False)
class Choice:
    """What kernels choose slots by.

    Attributes:
        counts: [rows] int32, how many pages or slots each row reads, 0 for all.
        store: What they are chosen by.
        channels: [layers, kv_heads, m] int32 of the keys' labels; None where pages are chosen, by bounds.
        bits: Of a label, 0 for the number itself.
        first, recent: Slots at the first positions, and at less than so many before a row, come before others.
    """

    counts: np.ndarray
    store: SideStore
    channels: np.ndarray | None = None
    bits: int = 0
    first: int = 0
    recent: int = 0


@dataclass(frozen=True, eq=False)
class Windows:
    """What rows see at the end of the text, and at its beginning.

    Attributes:
        widths: [rows] int32, a row sees slots at less than so many positions before its own, 0 for all.
        sinks: Rows with a width also read the slots at so many first positions,
        turned: by queries turned by these angles: cosines and sines [rows, head_dim / 2].
    """

    widths: np.ndarray
    sinks: int
    turned: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Sealed:
    """Which first tokens rows read in integers, whole groups of them.

    Attributes:
        ends: [rows] int32, how many.
        blocks: [layers, blocks of a layer] where the first `stored` of them are, `per_block` groups in each block.
        stored: How many tokens are in blocks; of others the first slots that a row sees are rounded.
        group: Tokens of a group.
        bits: Of a code.
        per_block: Groups of every block but a layer's last.
    """

    ends: np.ndarray
    blocks: ctypes.Array[SealedGroupsStruct]
    stored: int
    group: int
    bits: int
    per_block: int


@dataclass(frozen=True, eq=False)
class Lowered:
    """Scores that are lowered.

    Attributes:
        spans: [rows, 2] int32, of what a row sees, counted from the first slot: where the span begins and ends.
        by: What is added to scores in it.
    """

    spans: np.ndarray
    by: float


@dataclass(eq=False)
class KernelPolicy:
    """What kernels do for the rows of one pass, in the layers that a policy has a say in."""

    choice: Choice | None = None
    windows: Windows | None = None
    sealed: Sealed | None = None
    eviction: Eviction | None = None
    lowered: Lowered | None = None
    summed_from: int | None = None
    _paid: np.ndarray | None = field(default=None, init=False)
    _alive: list[object] = field(default_factory=list, init=False)
    _about: tuple[Segment, ModelConfig, AttentionPolicy] | None = field(default=None, init=False)

    def bind(self, segment: Segment, config: ModelConfig, policy: AttentionPolicy) -> KernelPolicy:
        """The same for these rows."""
        self._about = segment, config, policy
        return self

    def describe(self) -> int:
        """Write for kernels what they are to do; returns the address of that."""
        assert self._about is not None
        segment, config, policy = self._about
        cache, rows, kv_heads = segment.cache, len(segment), config.num_kv_heads
        assert cache is not None
        struct = PolicyStruct()
        acts = np.array([self._acts(layer, config, policy) for layer in range(config.num_layers)], dtype=np.uint8)
        struct.acts = address(acts, np.uint8, config.num_layers)
        self._alive += [struct, acts]
        if self.windows is not None:
            struct.widths, struct.sinks = address(self.windows.widths, np.int32, rows), self.windows.sinks
            shape = rows, config.head_dim // 2
            struct.cos, struct.sin = (address(each, torch.float32, *shape) for each in self.windows.turned)
        if self.lowered is not None:
            struct.lowered = address(self.lowered.spans, np.int32, rows, 2)
            struct.lowered_by = self.lowered.by
        if self.eviction is not None:
            self.eviction.describe(struct)
        if (sealed := self.sealed) is not None:
            struct.sealed = address(sealed.ends, np.int32, rows)
            struct.blocks = ctypes.addressof(sealed.blocks) if len(sealed.blocks) else None
            struct.block_count = len(sealed.blocks) // config.num_layers
            struct.stored, struct.group, struct.code_bits = sealed.stored, sealed.group, sealed.bits
            struct.block_groups = sealed.per_block
        if self.choice is not None:
            self._choose(struct, self.choice, segment, kv_heads)
        if self.summed_from is not None:
            slots = cache.length + segment.retained + rows
            self._paid = np.zeros((config.num_layers, kv_heads, slots), dtype=np.int64)
            struct.paid, struct.paid_slots = address(self._paid, np.int64, config.num_layers, kv_heads, slots), slots
            struct.paid_from = self.summed_from
        return ctypes.addressof(struct)

    def settle(self, run: Sequence[LayerStep]) -> None:
        """Hand on what came of it."""
        if self._paid is None:
            return
        assert self._about is not None
        segment, config, policy = self._about
        assert segment.cache is not None
        for layer in (stop.layer for stop in run if stop.attention):
            if self._acts(layer, config, policy):
                slots = int(segment.cache.lengths[layer]) + segment.retained + len(segment)
                policy.take_sums(layer, self._paid[layer, :, :slots] / PAID_UNIT)

    def _acts(self, layer: int, config: ModelConfig, policy: AttentionPolicy) -> bool:
        chosen = self.choice is None or bool(self.choice.store.layers[layer])
        evicts = self.eviction is None or bool(self.eviction.places[layer] >= 0)
        return chosen and evicts and (policy.windows or config.window(layer) is None)

    def _choose(self, struct: PolicyStruct, choice: Choice, segment: Segment, kv_heads: int) -> None:
        cache, rows, store = segment.cache, len(segment), choice.store
        assert cache is not None and isinstance(store.pages.pool, MappedPool)
        known = cache.length // SLOTS
        store.cover(known)
        table = store.pages.whole_table
        layers, _, columns = table.shape
        # Chosen pages or slots; then pages that are not full, and slots in them.
        room = int(choice.counts.max()) + 2 * (segment.retained + rows + 2 * SLOTS)
        picked = np.empty((kv_heads, rows, room), dtype=np.int32)
        struct.counts, struct.picked = address(choice.counts, np.int32, rows), address(picked, np.int32, *picked.shape)
        struct.room, struct.known = room, known
        struct.side_base, struct.side_bytes = store.pages.pool.base, store.pages.pool.page_bytes
        struct.side_table, struct.side_pages = address(table, np.int32, layers, kv_heads, columns), columns
        struct.summarised = address(store.summarised, np.int32, layers)
        struct.bits, struct.first, struct.recent = choice.bits, choice.first, choice.recent
        if choice.channels is not None:
            struct.channels = address(choice.channels, np.int32, *choice.channels.shape)
            struct.channel_count = choice.channels.shape[2]
        self._alive += [table, picked]


def kernel_policy(segment: Segment, config: ModelConfig) -> KernelPolicy | None:
    """What kernels do for the policy of a segment's cache; None where they do nothing."""
    cache = segment.cache
    if cache is None or cache.policy is None or cache.losses or segment.steered:
        return None
    found = cache.policy.by_kernel(segment)
    return None if found is None else found.bind(segment, config, cache.policy)


def whole(cache: KVCache) -> bool:
    """Whether a cache holds its text from the first token on, each at the slot of its position."""
    return not cache.evicted and not cache.prefix
