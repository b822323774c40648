"""One pass through a native stack: what kernels read of it, and its stops at hook points."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodery.core.native.kernels import address, check, library
from decodery.core.native.structs import PassStruct, SegmentStruct

from ..batch import Batch, Segment
from ..cache.kernel_policy import kernel_policy
from ..cache.open_rows import ELEMENTS
from ..cache.page_pool import SLOTS, MappedPool, page_bytes
from ..cache.sparse_indices import SparseIndices
from ..hooks import HookPoint, Hooks
from ..layer_plan import LayerStep
from ..torch.mixture import within
from .mixers import MixedSegment

if TYPE_CHECKING:
    from .stack import NativeStack

# As `Mark` in csrc/abi.h.
SKIP_ATTENTION, SKIP_MLP, _AT_SELECT, _AT_FOUND, _AT_HEADS, _AT_ATTENTION = (1 << i for i in range(6))
_AT_ROUTER, _AT_EXPERTS, _AT_MLP, _AT_RESIDUAL = (1 << i for i in range(6, 10))
_STOPS = ~(SKIP_ATTENTION | SKIP_MLP)
_LINE = 64


@dataclass
class NativeRows(Segment):
    """Rows of several texts whose caches kernels find by themselves: the last segment of a pass.

    Attributes:
        structs: What kernels read of each text; it is right as long as nothing else changes the texts' caches.
        took: [layers, rows, experts per token] where a pass of all layers says which experts the rows took.
    """

    structs: Sequence[SegmentStruct] = ()
    took: np.ndarray | None = None


class Walk:
    """One pass: native calls, each as far as the next hook point where Python has something to do."""

    def __init__(
        self, stack: NativeStack, hidden: torch.Tensor, batch: Batch, run: Sequence[LayerStep], hooks: Hooks
    ) -> None:
        config = self.config = stack.config
        self._stack, self._model = stack, stack.address
        self._hidden, self._batch, self._run, self._visits = hidden, batch, run, hooks
        self._alive: list[object] = []
        # What attends to nothing reads its rows alone.
        segments = batch.segments if any(stop.attention for stop in run) else []
        sparse = [number for number, segment in enumerate(segments) if segment.sparse]
        own = {number: kernel_policy(batch.segments[number], config) for number in sparse}
        self._own = {number: policy for number, policy in own.items() if policy is not None}
        self._picking = [number for number in sparse if number not in self._own]
        structs: list[SegmentStruct] = []
        self._mixed: list[MixedSegment] = []
        self._firsts: list[int] = []
        for segment in segments:
            self._firsts.append(len(structs))
            structs += self._structs(segment)
        self._segments = (SegmentStruct * len(structs))(*structs)
        for number, policy in self._own.items():
            self._segments[self._firsts[number]].policy = policy.describe()
        order, marks, states = stack.plan(run)
        streams = hooks.streams() and not self._picking and hooks.shared is None
        if not streams:
            marks = (c_int32 * len(run))(*(self._marks(stop) for stop in run))
        if hooks or self._picking:
            states = (c_void_p * len(run))()
            for i, stop in enumerate(run):
                # Most passes are read at a few places, and every one of them comes by here.
                if (after := _after(stop.layer)) in hooks and not marks[i] & _AT_RESIDUAL:
                    hooks.states[after] = torch.empty_like(hidden)
                    states[i] = address(hooks.states[after], torch.float32, *hidden.shape)
        rows = len(hidden)
        step = self._step = PassStruct(address(hidden, torch.float32, rows, config.hidden_size), self._segments)
        step.run, step.marks, step.taps = (ctypes.addressof(each) for each in (order, marks, states))
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None and segments]
        tables = [stack.table(rope, batch.positions) for rope in ropes]
        for i, (rope, (cos, sin)) in enumerate(zip(ropes, tables, strict=True)):
            half = config.rope_dim(rope) // 2
            step.cos[i], step.sin[i] = (address(each, torch.float32, rows, half) for each in (cos, sin))
        step.rows, step.segment_count, step.run_count = rows, len(structs), len(run)
        if config.temperature is not None:
            tempers = config.temperature.at(batch.positions)
            step.tempers = address(tempers, np.float32, rows)
            self._alive.append(tempers)
        self._took: np.ndarray | None = None
        if config.experts:
            self._took = np.empty((len(run), rows, config.experts_per_token), dtype=np.int32)
            step.took = address(self._took, np.int32, *self._took.shape)
        # Experts are laid out when they are first taken.
        late = any(not experts.whole for experts in stack.experts.values())
        self._stops = late or (not streams and any(mark & _STOPS for mark in marks))
        self._alive += [order, marks, states, tables]

    def read(self, inputs: torch.Tensor) -> None:
        """Have layers read inputs [rows, layers, layer_inputs] of the tokens."""
        config = self.config
        shape = len(self._hidden), config.num_layers, config.layer_inputs
        self._step.inputs = address(inputs, torch.float32, *shape)
        self._alive.append(inputs)

    def finish(self) -> None:
        """Go on to the last layer."""
        lib, step, run = library(), self._step, self._run
        assert lib is not None
        if self._stops:
            # What a pass works in must still be there when it goes on.
            room = np.empty(lib.decodery_room(self._model, ctypes.addressof(step)) + 64, dtype=np.uint8)
            step.memory = -(-room.ctypes.data // 64) * 64
            self._alive.append(room)
        indices: dict[int, SparseIndices | None] = {}
        while True:
            check(lib.decodery_layers(self._model, ctypes.addressof(step), None))
            if step.next == len(run):
                for policy in self._own.values():
                    policy.settle(run)
                for mixed in self._mixed:
                    mixed.settle()
                self._count()
                return
            layer = run[step.next].layer
            if step.stopped == _AT_SELECT:
                indices = {number: self._pick(number, layer) for number in self._picking}
            elif step.stopped == _AT_FOUND:
                self._read(indices)
            elif step.stopped == _AT_HEADS:
                self._visit(HookPoint("head_out", layer), step.context, self._stack.found_width(layer))
            elif step.stopped == _AT_ROUTER:
                self._share()
            elif step.stopped == _AT_EXPERTS:
                assert self._took is not None
                self._stack.experts[layer].lay_out(np.unique(self._took[step.next]).tolist())
            elif step.stopped == _AT_RESIDUAL:
                self._visit(
                    HookPoint("residual", layer + 1),
                    address(self._hidden, torch.float32, None, None),
                    self.config.hidden_size,
                )
            else:
                name = "attn_out" if step.stopped == _AT_ATTENTION else "mlp_out"
                self._visit(HookPoint(name, layer), step.branch, self.config.hidden_size)

    def _marks(self, stop: LayerStep) -> int:
        """What is left out of one layer, and where the pass stops in it."""
        layer, hooks = stop.layer, self._visits
        picking = stop.attention and bool(self._picking)
        found = self._stack.skipped(stop) | _AT_SELECT * picking
        found |= _AT_ROUTER * (stop.mlp and hooks.shared is not None and self.config.mixes(layer))
        found |= _AT_FOUND * picking | _AT_HEADS * (HookPoint("head_out", layer) in hooks)
        found |= _AT_ATTENTION * (HookPoint("attn_out", layer) in hooks) | _AT_MLP * (
            HookPoint("mlp_out", layer) in hooks
        )
        return found | _AT_RESIDUAL * hooks.changed(HookPoint("residual", layer + 1))

    def _share(self) -> None:
        """Let rows choose among the experts that their segments share."""
        shape = len(self._hidden), self.config.experts
        free = torch.frombuffer(
            (ctypes.c_double * (shape[0] * shape[1])).from_address(self._step.free), dtype=torch.float64
        ).view(shape)
        assert self._visits.shared is not None
        free.copy_(within(free, self._visits.shared, self.config.experts_per_token))

    def _count(self) -> None:
        """Say which experts rows took."""
        if self._took is None:
            return
        for segment, first in zip(self._batch.segments, self._batch.offsets, strict=False):
            if isinstance(segment, NativeRows) and segment.took is not None:
                segment.took[:] = self._took[:, first : first + len(segment)]
        for i, stop in enumerate(self._run):
            if stop.mlp and self.config.mixes(stop.layer):
                self._visits.chosen.append(torch.from_numpy(self._took[i]))

    def _visit(self, place: HookPoint, address: int, width: int) -> None:
        if place not in self._visits:
            return
        rows = _floats(address, len(self._hidden), width)
        changed = self._visits.visit(place, rows.clone())
        if self._visits.changed(place):
            rows.copy_(changed)

    def _pick(self, number: int, layer: int) -> SparseIndices | None:
        """Tell the kernels which slots the rows of one segment read in one layer; None for all that they see."""
        segment, offset = self._batch.segments[number], self._batch.offsets[number]
        heads, dim = self.config.num_heads, self.config.head_dim
        wide = -(-dim // 16) * 16
        queries = _floats(self._step.queries, len(self._hidden), heads * wide)[offset : offset + len(segment)]
        indices = SparseIndices.of(
            segment, layer, queries.view(-1, heads, wide)[..., :dim].clone(), self.config.window(layer)
        )
        struct = self._segments[self._firsts[number]]
        # Not every layer's weights are wanted: those of an earlier one may be gone.
        struct.starts = struct.picked = struct.weights = struct.mass = None
        if indices is None:
            return None
        struct.starts = address(indices.starts, np.int32, self.config.num_kv_heads * indices.rows + 1)
        struct.picked = address(indices.rows_read, np.int32, len(indices.slots))
        if indices.weights is not None:
            group = heads // self.config.num_kv_heads
            struct.weights = address(indices.weights, torch.float32, group, len(indices.slots))
        if indices.mass is not None:
            struct.mass = address(indices.mass, torch.float32, indices.rows, heads)
        return indices

    def _read(self, indices: dict[int, SparseIndices | None]) -> None:
        """Show policies what was read in this layer."""
        width = self.config.num_heads * self.config.head_dim
        for number, picked in indices.items():
            if picked is None:
                continue
            offset = self._batch.offsets[number]
            context = _floats(self._step.context, len(self._hidden), width)[offset : offset + picked.rows]
            picked.settle(context)

    def _structs(self, segment: Segment) -> Sequence[SegmentStruct]:
        return segment.structs if isinstance(segment, NativeRows) else [self._segment(segment)]

    def _segment(self, segment: Segment) -> SegmentStruct:
        n, kv_heads = len(segment), self.config.num_kv_heads
        positions = np.ascontiguousarray(segment.positions, dtype=np.int64)
        causal = segment.mask is None and not segment.retained
        mask = None if causal else np.ascontiguousarray(segment.seen())
        cache, lengths_head = segment.cache, 0
        if cache is None:
            # Rows that see each other only: room for one layer's keys and values, used by every layer in turn, or for
            # those of all layers where later ones read them.
            dtype, size, pages = torch.float32, page_bytes(self.config.head_dim, torch.float32), -(-n // SLOTS)
            layers = self.config.cache_layers if self.config.reused_layers else 1
            memory = torch.empty(layers * kv_heads * pages * size + _LINE, dtype=torch.uint8, device="cpu")
            base = -(-memory.data_ptr() // _LINE) * _LINE
            table = np.arange(layers * kv_heads * pages, dtype=np.int32).reshape(layers, kv_heads, pages)
            lengths = np.zeros(1, dtype=np.int64)
            slots, slots_layer, lengths_layer = positions.astype(np.int32), 0, 0
            table_layer = kv_heads * pages if layers > 1 else 0
            self._alive.append(memory)
        else:
            pool = cache.pages.pool
            assert isinstance(pool, MappedPool)
            dtype, size, base, table = pool.dtype, pool.page_bytes, pool.base, cache.pages.whole_table
            lengths, pages, lengths_layer = cache.lengths, table.shape[2], 1
            if cache.losses:
                lengths, lengths_layer, lengths_head = cache.head_lengths, kv_heads, 1
            slots, slots_layer = cache.slot_positions.table
            table_layer = kv_heads * pages
        self._alive += [positions, mask, table, lengths, slots]
        struct = SegmentStruct(
            base, address(table, np.int32, None, kv_heads, pages), address(lengths, np.int64, *lengths.shape),
            address(slots, np.int32, *slots.shape, apart=True), address(positions, np.int64, n),
            None if mask is None else address(mask, np.bool_, n, segment.retained + n), size, table_layer, pages,
            lengths_layer, lengths_head, slots_layer, 0, n, segment.retained, ELEMENTS[dtype], pages,
        )  # fmt: skip
        if self._stack.mixers is not None:
            self._mixed.append(self._stack.mixers.describe(segment, struct))
        return struct


@lru_cache(maxsize=1024)
def _after(layer: int) -> HookPoint:
    """The stream after a layer."""
    return HookPoint("residual", layer + 1)


def _floats(address: int, rows: int, width: int) -> torch.Tensor:
    """[rows, width] float32 that lie at an address; the memory must outlive it."""
    return torch.frombuffer((ctypes.c_float * (rows * width)).from_address(address), dtype=torch.float32).view(
        rows, width
    )
