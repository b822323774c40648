"""All layers of a model in native calls: int8, int4 or bfloat16 weights, all else in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, c_int32, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.native.kernels import (
    LayerStruct,
    LinearStruct,
    MixerStruct,
    ModelStruct,
    PassStruct,
    SegmentStruct,
    address,
    check,
    library,
)

from ..batch import Batch, Segment
from ..cache.kernel_policy import kernel_policy
from ..cache.open_rows import ELEMENTS
from ..cache.page_pool import SLOTS, MappedPool, page_bytes
from ..cache.sparse_indices import SparseIndices
from ..config import CLAMPED, ModelConfig, Rope
from ..hooks import HookPoint, Hooks
from ..layer_plan import LayerStep
from ..loaders.in_place import InPlace
from ..mapped_memory import forget, mapped_files
from ..torch.mixture import within
from .experts import Experts
from .mixers import MixedSegment, Mixers
from .packed import Arena, Packed, packed_size

if TYPE_CHECKING:
    from ..torch.weights import Layer, Weights

Angles = Callable[[Rope, np.ndarray], tuple[torch.Tensor, torch.Tensor]]

# As `Mark` in csrc/abi.h.
_SKIP_ATTENTION, _SKIP_MLP, _AT_SELECT, _AT_HEADS, _AT_ATTENTION = (1 << i for i in range(5))
_AT_ROUTER, _AT_EXPERTS, _AT_MLP, _AT_RESIDUAL = (1 << i for i in range(5, 9))
OPENINGS = {"silu": 0, "gelu_tanh": 1, CLAMPED: 2}
_STOPS = ~(_SKIP_ATTENTION | _SKIP_MLP)
_MOST_PLANS = 256
_LINE = 64
_HEAD_NORMS = {"q_norm": "q_norm", "k_norm": "k_norm"}
_BEFORE = {name: name for name in ("attention_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm")} | _HEAD_NORMS
_AFTER = {"post_attention_norm": "attention_norm", "post_mlp_norm": "mlp_norm"} | _HEAD_NORMS
"""By norm of `Layer` in csrc/abi.h, that of `weights.Layer`."""


class NativeStack:
    """All layers and the head of a model, in one native call per pass or per visited hook point.

    A row's result depends on that row alone, bit for bit: not on the number of rows, on chunking, on the other
    sequences of the batch or on the shape of a tree. `angles(rope, positions)` gives cosines and sines [N, head_dim /
    2] float32.

    Args:
        mixers: See `Mixers`.
        attention: Whether layers have what attends, and the model its head, or MLPs and experts alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        angles: Angles,
        *,
        mixers: Mapping[int, tuple[MixerStruct, Sequence[int]]] | None = None,
        attention: bool = True,
    ) -> None:
        self.config = config
        self._angles = angles
        self._alive: list[object] = []
        self._files = mapped_files()
        self._plans: dict[tuple[LayerStep, ...], tuple[Array[c_int32], Array[c_int32], Array[c_void_p]]] = {}
        self.mixers = Mixers(mixers) if mixers else None
        matrices = [_matrices(layer, index, config, attention) for index, layer in enumerate(weights.layers)]
        total = packed_size(weights.head) if attention else 0  # type: ignore[arg-type]
        for named in matrices:
            total += sum(packed_size(linear, gated=name == "gate_up") for name, linear in named.items())
        arena = Arena(total)
        # The largest first: what it is packed from is still in memory then.
        head = LinearStruct()
        if attention:
            self.project = self._pack(weights.head, arena)
            head = self.project.struct
        layers = (LayerStruct * config.num_layers)()
        self.experts: dict[int, Experts] = {}
        for index, layer in enumerate(weights.layers):
            for name, linear in matrices[index].items():
                setattr(layers[index], name, self._pack(linear, arena, gated=name == "gate_up").struct)
            if self.mixers is not None:
                layers[index].mixer = self.mixers.address(index)
            if config.mixes(index):
                experts = self.experts[index] = Experts(layer, config, self._files)
                layers[index].experts = experts.address
            # Where norms are those of what sublayers found, these read the stream as it is.
            norms = _AFTER if config.norms_after else _BEFORE
            for norm, part in norms.items():
                if norm in _HEAD_NORMS and not attention:
                    continue
                wide = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}.get(norm)
                width = config.hidden_size if wide is None else config.head_dim * (wide if config.wide_qk_norm else 1)
                setattr(layers[index], norm, self._pointer(getattr(layer, part), width))
            if config.norms_units(index):
                ones = torch.ones(config.head_dim, dtype=torch.float32, device="cpu")
                layers[index].q_norm = layers[index].k_norm = self._pointer(ones, config.head_dim)
            layers[index].sinks = self._pointer(layer.sinks, config.num_heads)
            layers[index].tempered = int(config.tempers(index))
            layers[index].window = config.window(index) or 0
            layers[index].rope = int(config.turns_locally(index))
        self._alive += [layers, mixers]
        self._layers = layers
        inner = max((each.down.inputs for each in layers), default=0)
        self._model = ModelStruct(
            layers, self._pointer(weights.norm, config.hidden_size), head, config.hidden_size,
            inner, config.num_heads, config.num_kv_heads, config.head_dim,
            OPENINGS[config.activation], config.norm_eps, config.attention_scale,
            0.0 if config.residual_scale == 1.0 else config.residual_scale,
            int(config.wide_qk_norm), int(config.norms_after_rope or config.unit_norms), config.attention_cap,
            config.logit_cap,
        )  # fmt: skip

    def _pack(self, linear: Any, arena: Arena, *, gated: bool = False) -> Packed:
        packed = Packed(linear, arena, gated=gated)
        self._alive.append(packed)
        if not isinstance(linear, InPlace):
            for tensor in linear.tensors().values():
                forget(tensor, self._files)
        return packed

    @property
    def address(self) -> int:
        """Where the kernels find the model."""
        return ctypes.addressof(self._model)

    def layers(self, hidden: torch.Tensor, batch: Batch, run: Sequence[LayerStep], hooks: Hooks) -> torch.Tensor:
        """[N, hidden] -> the residual stream after the layers `run` [N, hidden] float32.

        Every segment's cache must have been reserved for this pass; the rows' keys and values are written to it.
        """
        result = hidden.to(torch.float32, copy=True).contiguous()
        if len(result) and len(run):
            _Walk(self, result, batch, run, hooks).finish()
            attended = [stop.layer for stop in run if stop.attention]
            for segment in batch.segments:
                if segment.cache is not None and attended:
                    # Layers that mix rows have put theirs into further layers of the cache.
                    all_layers = range(self.config.cache_layers)
                    segment.cache.wrote(attended if self.mixers is None else all_layers)
        return result

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection: [M, hidden] -> [M, outputs of the head] float32."""
        return self._rows("decodery_head", hidden, self._model.head.outputs)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> what `project` makes the logits of that `head` caps, if it does."""
        return self._rows("decodery_norm", hidden, self.config.hidden_size)

    def _rows(self, kernel: str, hidden: torch.Tensor, width: int) -> torch.Tensor:
        hidden = hidden.to(torch.float32).contiguous()
        result = torch.empty(len(hidden), width, dtype=torch.float32, device="cpu")
        if len(hidden):
            run = getattr(library(), kernel)
            read = address(hidden, torch.float32, len(result), self.config.hidden_size)
            check(run(self.address, read, len(hidden), address(result, torch.float32, len(hidden), width)))
        return result

    def plan(self, run: Sequence[LayerStep]) -> tuple[Array[c_int32], Array[c_int32], Array[c_void_p]]:
        """The layers of a route, what is left out of each, and no taps: as the kernels read them, made once."""
        key = tuple(run)
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            order, marks = (stop.layer for stop in key), (self.skipped(stop) for stop in key)
            n = len(key)
            self._plans[key] = (c_int32 * n)(*order), (c_int32 * n)(*marks), (c_void_p * n)()
        return self._plans[key]

    def skipped(self, stop: LayerStep) -> int:
        """What is left out of a layer, as the kernels read it."""
        attention = stop.attention and self.config.has_mixer(stop.layer)
        mlp = stop.mlp and self.config.has_mlp(stop.layer)
        return _SKIP_ATTENTION * (not attention) | _SKIP_MLP * (not mlp)

    def found_width(self, layer: int) -> int:
        """Numbers of a row that a layer's second projection reads."""
        width: int = self._layers[layer].output.inputs
        return width

    def table(self, rope: Rope, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as the kernels read them."""
        cos, sin = self._angles(rope, positions)
        return cos.contiguous(), sin.contiguous()

    def _pointer(self, values: torch.Tensor | None, width: int) -> int | None:
        if values is None or not len(values):
            return None
        kept = values.detach().to(torch.float32).contiguous()
        self._alive.append(kept)
        return address(kept, torch.float32, width)


@dataclass
class NativeRows(Segment):
    """Rows of several texts whose caches kernels find by themselves: the last segment of a pass.

    Attributes:
        structs: What kernels read of each text; it is right as long as nothing else changes the texts' caches.
        took: [layers, rows, experts per token] where a pass of all layers says which experts the rows took.
    """

    structs: Sequence[SegmentStruct] = ()
    took: np.ndarray | None = None


class _Walk:
    """One pass: a native call as far as the next hook point where Python has something to do, and so on to the end."""

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
        rows, half = len(hidden), config.head_dim // 2
        step = self._step = PassStruct(address(hidden, torch.float32, rows, config.hidden_size), self._segments)
        step.run, step.marks, step.taps = (ctypes.addressof(each) for each in (order, marks, states))
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None and segments]
        tables = [stack.table(rope, batch.positions) for rope in ropes]
        for i, (cos, sin) in enumerate(tables):
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
            elif step.stopped == _AT_HEADS:
                self._read(indices)
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
        found |= _AT_HEADS * (picking or HookPoint("head_out", layer) in hooks)
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
            # Rows that see each other only: room for one layer's keys and values, used by every layer in turn.
            dtype, size, pages = torch.float32, page_bytes(self.config.head_dim, torch.float32), -(-n // SLOTS)
            memory = torch.empty(kv_heads * pages * size + _LINE, dtype=torch.uint8, device="cpu")
            base = -(-memory.data_ptr() // _LINE) * _LINE
            table = np.arange(kv_heads * pages, dtype=np.int32).reshape(1, kv_heads, pages)
            lengths = np.zeros(1, dtype=np.int64)
            slots, slots_layer, table_layer, lengths_layer = positions.astype(np.int32), 0, 0, 0
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


def _matrices(layer: Layer, index: int, config: ModelConfig, attention: bool) -> dict[str, Any]:
    """The linear layers of a layer that all rows take, by their names in csrc/abi.h."""
    mixing = {"qkv": layer.qkv, "output": layer.output, "steps": layer.steps, "gate": layer.out_gate}
    named = mixing if attention and config.has_mixer(index) else {}
    if config.mixes(index):
        named = named | {"gate_up": layer.shared_gate_up, "down": layer.shared_down}
    elif config.has_mlp(index):
        named = named | {"gate_up": layer.gate_up, "down": layer.down}
    return {name: linear for name, linear in named.items() if linear is not None}


def _floats(address: int, rows: int, width: int) -> torch.Tensor:
    """[rows, width] float32 that lie at an address; the memory must outlive it."""
    return torch.frombuffer((ctypes.c_float * (rows * width)).from_address(address), dtype=torch.float32).view(
        rows, width
    )
