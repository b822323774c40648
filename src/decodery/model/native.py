"""The native kernels: found, loaded and called without PyTorch's headers, through a plain C interface."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import mmap
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import CorruptFile, OutOfMemory
from .batch import Batch, Segment
from .blocks import SLOTS
from .config import ModelConfig, Rope

if TYPE_CHECKING:
    from .int4 import Int4Linear
    from .int8 import Int8Linear
    from .weights import Weights

GROUP = 64  # inputs that share one activation scale
BLOCK = 32  # inputs that share one step of 4-bit weights
BLOCK_BYTES = 640  # of a panel's 4-bit weights for one block
PANEL = 32  # outputs computed side by side

Angles = Callable[[Rope, np.ndarray], tuple[torch.Tensor, torch.Tensor]]


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32),
        ("bits", c_int32),
    ]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", _Linear), ("output", _Linear), ("gate_up", _Linear), ("down", _Linear),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p), ("post_mlp_norm", c_void_p), ("window", c_int32), ("rope", c_int32),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)), ("norm", c_void_p), ("head", _Linear), ("hidden", c_int32),
        ("intermediate", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("gelu", c_int32), ("eps", c_float), ("attention_scale", c_float),
    ]  # fmt: skip


class _Run(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("layer_stride", c_int64), ("kind_stride", c_int64), ("head_stride", c_int64),
        ("first", c_int32), ("end", c_int32),
    ]  # fmt: skip


class _Segment(ctypes.Structure):
    _fields_ = [
        ("runs", POINTER(_Run)), ("lengths", c_void_p), ("slots", c_void_p), ("positions", c_void_p),
        ("mask", c_void_p), ("slots_stride", c_int64), ("run_count", c_int32), ("rows", c_int32), ("stays", c_int32),
        ("bf16", c_int32),
    ]  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = [
        ("hidden", c_void_p), ("segments", POINTER(_Segment)), ("run", c_void_p), ("taps", c_void_p),
        ("cos", c_void_p * 2), ("sin", c_void_p * 2), ("rows", c_int32), ("segment_count", c_int32),
        ("run_count", c_int32),
    ]  # fmt: skip


_STRUCTS = (_Linear, _Layer, _Model, _Run, _Segment, _Pass)  # in the order of csrc/abi.h


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels with as many threads as PyTorch uses, or None where they were not built.

    Raises CorruptFile where they were built from other sources than this file belongs to.
    """
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if not path.exists():
            continue
        try:
            lib = ctypes.CDLL(str(path))
        except OSError:
            return None
        check_layout(lib, path)
        lib.decodery_kernels.restype = c_char_p
        lib.decodery_read.restype = c_double
        lib.decodery_read.argtypes = [c_void_p, c_int64]
        lib.decodery_pack.argtypes = [c_void_p, c_int32, c_void_p, c_int32, c_void_p]
        lib.decodery_pack4.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p]
        lib.decodery_layers.argtypes = [c_void_p, c_void_p, c_void_p]
        lib.decodery_head.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
        lib.decodery_linear.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
        lib.decodery_topk.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p]
        lib.decodery_threads(torch.get_num_threads())
        return lib
    return None


def check_layout(lib: object, path: Path) -> None:
    """Raise CorruptFile unless `lib` has the structs of this file: it would read and write wrong places."""
    size = getattr(lib, "decodery_size", None)
    ours = [ctypes.sizeof(struct) for struct in _STRUCTS] + [0]
    if size is None or [size(i) for i in range(len(ours))] != ours:
        raise CorruptFile(f"{path} was built from other sources: build it again (make demo, or pip install -e .)")


def kernel_sets() -> list[str]:
    """Names of the instruction sets usable on this machine, the fastest (and chosen) first."""
    lib = library()
    names: list[str] = []
    while lib is not None and (name := lib.decodery_kernels(len(names))) is not None:
        names.append(name.decode())
    return names


def choose(kernels: str) -> None:
    """Use this one of `kernel_sets()` from now on; all of them give the same results."""
    lib = library()
    assert lib is not None
    lib.decodery_choose(kernel_sets().index(kernels))


def status() -> str:
    """One sentence: which kernels are in use, or why none."""
    names = kernel_sets()
    if names:
        return f"int8 runs on native kernels ({names[0]}, {torch.get_num_threads()} threads)"
    return "int8 runs on PyTorch alone: the native kernels were not built (install a C++ compiler and reinstall)"


def read_bandwidth(*, mebibytes: int = 512, rounds: int = 5) -> float:
    """Fastest streaming read of a buffer larger than the caches, by all threads, in GB/s (1e9 bytes per second)."""
    buffer = torch.ones(mebibytes * 2**20 // 8, dtype=torch.float64)
    size = buffer.nbytes
    lib = library()
    if lib is None:
        return max(size / seconds for seconds in _sum_times(buffer, rounds)) / 1e9
    return max(size / lib.decodery_read(buffer.data_ptr(), size) for _ in range(rounds)) / 1e9


def _sum_times(buffer: torch.Tensor, rounds: int) -> list[float]:
    from time import perf_counter

    times = []
    for _ in range(rounds):
        begin = perf_counter()
        buffer.sum()
        times.append(perf_counter() - begin)
    return times


class Arena:
    """Memory for packed weights on huge pages where the system grants them; parts start at cache lines."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, max(size, 64))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._used = 0

    def take(self, size: int) -> np.ndarray:
        part = self._bytes[self._used : self._used + size]
        assert len(part) == size, "arena too small"
        self._used += -(-size // 64) * 64
        return part


class Packed:
    """One linear layer in the kernels' layout. `gated`: panels of 16 gates and the 16 values they open."""

    def __init__(self, linear: Int8Linear | Int4Linear, arena: Arena | None = None, *, gated: bool = False) -> None:
        lib = library()
        assert lib is not None
        self.outputs, self.inputs = linear.shape
        order = self._order(self.outputs, gated)
        size = packed_size(linear, gated=gated)
        self._weight = (Arena(size) if arena is None else arena).take(size)
        weight, packed = linear.weight.contiguous(), self._weight.ctypes.data
        self._scale = None
        if linear.bits == 8:
            lib.decodery_pack(weight.data_ptr(), self.inputs, order.ctypes.data, len(order), packed)
            self._scale = self._spread(linear.scale, order)
        else:
            step, least = linear.step.contiguous(), linear.least.contiguous()
            lib.decodery_pack4(
                weight.data_ptr(), step.data_ptr(), least.data_ptr(), self.inputs, order.ctypes.data, len(order),
                packed,
            )  # fmt: skip
        self._bias = None if linear.bias is None else self._spread(linear.bias, order)
        scale, bias = (None if values is None else values.ctypes.data for values in (self._scale, self._bias))
        self.struct = _Linear(packed, scale, bias, self.inputs, self.outputs, linear.bits)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] float32 -> [N, out] float32."""
        lib = library()
        assert lib is not None
        rows = rows.contiguous()
        result = torch.empty(len(rows), self.outputs)
        if len(rows):
            _check(lib.decodery_linear(ctypes.addressof(self.struct), rows.data_ptr(), len(rows), result.data_ptr()))
        return result

    @staticmethod
    def _order(outputs: int, gated: bool) -> np.ndarray:
        """Which row of the weight each packed output is, -1 for padding."""
        if not gated:
            order = np.full(-(-outputs // PANEL) * PANEL, -1, dtype=np.int32)
            order[:outputs] = np.arange(outputs)
            return order
        width, half = outputs // 2, PANEL // 2
        panels = -(-width // half)
        gates = np.full(panels * half, -1, dtype=np.int32)
        gates[:width] = np.arange(width)
        values = np.where(gates >= 0, gates + width, -1)
        return (
            np.concatenate((gates.reshape(panels, 1, half), values.reshape(panels, 1, half)), axis=1)
            .astype(np.int32)
            .ravel()
        )

    @staticmethod
    def _spread(values: torch.Tensor, order: np.ndarray) -> np.ndarray:
        known = values.detach().float().numpy()
        return np.where(order >= 0, known[np.maximum(order, 0)], np.float32(0)).astype(np.float32)


def packed_size(linear: Int8Linear | Int4Linear, *, gated: bool = False) -> int:
    """Bytes `Packed` takes from an arena."""
    outputs, inputs = linear.shape
    panels = -(-(outputs // 2) // (PANEL // 2)) if gated else -(-outputs // PANEL)
    groups = -(-inputs // GROUP)
    return panels * groups * (PANEL * GROUP if linear.bits == 8 else 2 * BLOCK_BYTES)


class Int8Stack:
    """All layers and the head of an int8 model, run by one native call per pass.

    A row's result depends on that row alone, bit for bit: not on the number of rows, on chunking, on the other
    sequences of the batch or on the shape of a tree. `angles(rope, positions)` gives cosines and sines
    [N, head_dim / 2] float32.
    """

    def __init__(self, config: ModelConfig, weights: Weights, angles: Angles) -> None:
        self.config = config
        self._angles = angles
        self._alive: list[object] = []
        names = ("qkv", "output", "gate_up", "down")
        total = packed_size(weights.head)  # type: ignore[arg-type]
        for layer in weights.layers:
            total += sum(packed_size(getattr(layer, name), gated=name == "gate_up") for name in names)
        arena = Arena(total)
        layers = (_Layer * config.num_layers)()
        for index, layer in enumerate(weights.layers):
            for name in names:
                packed = Packed(getattr(layer, name), arena, gated=name == "gate_up")
                setattr(layers[index], name, packed.struct)
                self._alive.append(packed)
            for norm in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm"):
                setattr(layers[index], norm, self._pointer(getattr(layer, norm)))
            layers[index].window = config.window(index) or 0
            layers[index].rope = int(bool(config.local_rope and config.sliding_layers[index]))
        head = Packed(weights.head, arena)  # type: ignore[arg-type]
        self._alive += [layers, head]
        self._model = _Model(
            layers, self._pointer(weights.norm), head.struct, config.hidden_size, config.intermediate_size,
            config.num_heads, config.num_kv_heads, config.head_dim, int(config.activation != "silu"),
            config.norm_eps, config.attention_scale,
        )  # fmt: skip

    def layers(
        self, hidden: torch.Tensor, batch: Batch, run: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """[N, hidden] -> the residual stream after the layers `run` [N, hidden] float32, and {layer: tapped states}.

        Every segment's cache must have been reserved for this pass; the rows' keys and values are written to it.
        """
        lib = library()
        assert lib is not None
        result = hidden.to(torch.float32, copy=True).contiguous()
        tapped = {0: hidden.float()} if 0 in taps else {}
        n = len(result)
        if n == 0 or len(run) == 0:
            return result, tapped
        order = (c_int32 * len(run))(*run)
        states = (c_void_p * len(run))()
        for i, index in enumerate(run):
            if index + 1 in taps:
                tapped[index + 1] = torch.empty_like(result)
                states[i] = tapped[index + 1].data_ptr()
        alive: list[object] = []
        segments = (_Segment * len(batch.segments))(*(self._segment(s, alive) for s in batch.segments))
        tables = [self._table(self.config.rope, batch.positions)]
        if self.config.local_rope is not None:
            tables.append(self._table(self.config.local_rope, batch.positions))
        step = _Pass(result.data_ptr(), segments, ctypes.addressof(order), ctypes.addressof(states))
        for i, (cos, sin) in enumerate(tables):
            step.cos[i], step.sin[i] = cos.data_ptr(), sin.data_ptr()
        step.rows, step.segment_count, step.run_count = n, len(segments), len(run)
        _check(lib.decodery_layers(ctypes.addressof(self._model), ctypes.addressof(step), None))
        for segment in batch.segments:
            if segment.cache is not None:
                segment.cache.wrote(run)
        return result, tapped

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection: [M, hidden] -> [M, outputs of the head] float32."""
        lib = library()
        assert lib is not None
        hidden = hidden.to(torch.float32).contiguous()
        logits = torch.empty(len(hidden), self._model.head.outputs)
        if len(hidden):
            model = ctypes.addressof(self._model)
            _check(lib.decodery_head(model, hidden.data_ptr(), len(hidden), logits.data_ptr()))
        return logits

    def _pointer(self, values: torch.Tensor | None) -> int | None:
        if values is None:
            return None
        kept = values.detach().to(torch.float32).contiguous()
        self._alive.append(kept)
        return kept.data_ptr()

    def _table(self, rope: Rope, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._angles(rope, positions)
        return cos.contiguous(), sin.contiguous()

    def _segment(self, segment: Segment, alive: list[object]) -> _Segment:
        n = len(segment)
        positions = np.ascontiguousarray(segment.positions, dtype=np.int64)
        causal = segment.mask is None and not segment.stays
        mask = None if causal else np.ascontiguousarray(segment.seen())
        cache = segment.cache
        if cache is None:
            # Rows that see each other only: room for one layer's keys and values, used by every layer in turn.
            data = torch.empty(1, 2, self.config.num_kv_heads, n, self.config.head_dim)
            lengths = np.zeros(self.config.num_layers, dtype=np.int64)
            slots = np.broadcast_to(positions.astype(np.int32), (self.config.num_layers, n))
            runs = (_Run * 1)(_Run(data.data_ptr(), 0, data.stride(1), data.stride(2), 0, n))
        else:
            lengths, slots, data = cache.lengths, cache.positions, cache.blocks.nothing
            runs, first = (_Run * len(cache.blocks.runs))(), 0
            for run, held in zip(runs, cache.blocks.runs, strict=True):
                memory = held.slab.data
                run.layer_stride, run.kind_stride, run.head_stride, slot, _ = memory.stride()
                run.data = memory.data_ptr() + held.first * SLOTS * slot * memory.itemsize
                run.first, run.end = first, first + held.slots
                first = run.end
        alive += [positions, mask, data, runs, lengths, slots]
        return _Segment(
            runs, lengths.ctypes.data, slots.ctypes.data, positions.ctypes.data,
            None if mask is None else mask.ctypes.data, slots.strides[0] // slots.itemsize, len(runs), n,
            segment.stays, int(data.dtype == torch.bfloat16),
        )  # fmt: skip


def _check(code: int) -> None:
    if code:
        raise OutOfMemory("no memory for the working buffers of a pass: use a shorter chunk or fewer sequences at once")
