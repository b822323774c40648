"""The native kernels: found, loaded and called without PyTorch's headers, through a plain C interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch

from ..errors import CorruptFile, OutOfMemory

Numbers = torch.Tensor | np.ndarray


class Form(IntEnum):
    """How the weights of a linear layer are kept: `Form` in csrc/abi.h."""

    ROWS8, ROWS2, BLOCKS4, TABLE4, BLOCKS5, BLOCKS6, BLOCKS8, BFLOAT16, FLOAT16 = range(9)
    SUPER4, SUPER_TABLE4, SUPER5, SUPER6 = range(9, 13)
    FLOAT4, FLOAT8, CODES4 = range(13, 16)


class Rule(IntEnum):
    """How a layer's state goes on from row to row: `Rule` in csrc/abi.h."""

    MAMBA2, GATED_DELTA, GATED_CONV = range(3)


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32),
        ("form", c_int32),
    ]  # fmt: skip


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("qkv", LinearStruct), ("output", LinearStruct), ("gate_up", LinearStruct), ("down", LinearStruct),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p), ("post_mlp_norm", c_void_p), ("window", c_int32), ("rope", c_int32),
        ("sinks", c_void_p), ("tempered", c_int32), ("mixer", c_void_p), ("steps", LinearStruct),
        ("gate", LinearStruct), ("experts", c_void_p), ("latent", c_void_p),
        ("head_dim", c_int32), ("kv_heads", c_int32), ("reads", c_int32), ("v_norm", c_void_p), ("inputs", c_void_p),
        ("scale", c_float), ("mix_in", LinearStruct), ("mix_out", LinearStruct),
    ]  # fmt: skip


class LatentStruct(ctypes.Structure):
    _fields_ = [
        ("up", LinearStruct), ("keys", c_void_p), ("values", c_void_p), ("rank", c_int32), ("turned", c_int32),
        ("plain", c_int32), ("value", c_int32), ("narrow", c_int32), ("eps", c_float),
    ]  # fmt: skip


class TokenInputsStruct(ctypes.Structure):
    _fields_ = [
        ("gate", LinearStruct), ("out", LinearStruct), ("norm", c_void_p), ("at", c_int32), ("stride", c_int32),
    ]  # fmt: skip


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        ("router", c_void_p), ("router_bias", c_void_p), ("choice_bias", c_void_p), ("scales", c_void_p),
        ("share", c_void_p), ("gate_up", POINTER(LinearStruct)), ("down", POINTER(LinearStruct)), ("count", c_int32),
        ("taken", c_int32), ("groups", c_int32), ("taken_groups", c_int32), ("group_best", c_int32),
        ("sigmoid", c_int32), ("normed", c_int32), ("scaled_inputs", c_int32), ("nothing", c_double),
        ("scale", c_double), ("router_norm", c_void_p), ("enter_norm", c_void_p), ("leave_norm", c_void_p),
        ("mlp_leave_norm", c_void_p),
    ]  # fmt: skip


class ModelStruct(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(LayerStruct)), ("norm", c_void_p), ("head", LinearStruct), ("hidden", c_int32),
        ("intermediate", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("opening", c_int32), ("eps", c_float), ("attention_scale", c_float), ("residual_scale", c_float),
        ("wide_norms", c_int32), ("late_norms", c_int32), ("attention_cap", c_float), ("logit_cap", c_float),
    ]  # fmt: skip


class PageRowsStruct(ctypes.Structure):
    _fields_ = [
        ("base", c_void_p), ("tables", c_void_p), ("slots", c_void_p), ("rows", c_void_p), ("page_bytes", c_int64),
        ("row_bytes", c_int64), ("count", c_int64), ("start", c_int64), ("layers", c_int32), ("heads", c_int32),
        ("table_pages", c_int32), ("number_bytes", c_int32),
    ]  # fmt: skip


class PolicyStruct(ctypes.Structure):
    _fields_ = [
        ("acts", c_void_p), ("widths", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("counts", c_void_p),
        ("channels", c_void_p), ("side_base", c_void_p), ("side_table", c_void_p), ("summarised", c_void_p),
        ("picked", c_void_p), ("paid", c_void_p), ("side_bytes", c_int64), ("sinks", c_int32),
        ("channel_count", c_int32), ("bits", c_int32), ("first", c_int32), ("recent", c_int32), ("known", c_int32),
        ("side_pages", c_int32), ("room", c_int32), ("paid_from", c_int32), ("paid_slots", c_int32),
    ]  # fmt: skip


class SegmentStruct(ctypes.Structure):
    _fields_ = [
        ("base", c_void_p), ("pages", c_void_p), ("lengths", c_void_p), ("slots", c_void_p), ("positions", c_void_p),
        ("mask", c_void_p), ("page_bytes", c_int64), ("table_layer", c_int64), ("table_head", c_int64),
        ("lengths_layer", c_int64), ("lengths_head", c_int64), ("slots_layer", c_int64), ("slots_head", c_int64),
        ("rows", c_int32), ("stays", c_int32), ("element", c_int32), ("table_pages", c_int32), ("starts", c_void_p),
        ("picked", c_void_p), ("weights", c_void_p), ("mass", c_void_p), ("policy", c_void_p),
        ("states", c_void_p), ("after", c_void_p), ("parents", c_void_p), ("known", c_int32), ("keeps", c_int32),
    ]  # fmt: skip


class PassStruct(ctypes.Structure):
    _fields_ = [
        ("hidden", c_void_p), ("segments", POINTER(SegmentStruct)), ("run", c_void_p), ("marks", c_void_p),
        ("taps", c_void_p), ("cos", c_void_p * 2), ("sin", c_void_p * 2), ("rows", c_int32), ("segment_count", c_int32),
        ("run_count", c_int32), ("next", c_int32), ("stopped", c_int32), ("memory", c_void_p), ("queries", c_void_p),
        ("context", c_void_p), ("branch", c_void_p), ("tempers", c_void_p), ("took", c_void_p), ("free", c_void_p),
        ("inputs", c_void_p),
    ]  # fmt: skip


class DraftStruct(ctypes.Structure):
    _fields_ = [
        ("model", ModelStruct), ("enter", LinearStruct), ("token_norm", c_void_p), ("feature_norm", c_void_p),
        ("taps", c_int32), ("norm_first", c_int32),
    ]  # fmt: skip


class GuessStruct(ctypes.Structure):
    _fields_ = [
        ("passed", PassStruct), ("given", c_void_p), ("embedded", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("features", c_void_p), ("logits", c_void_p), ("vocabulary", c_void_p), ("said", c_void_p),
        ("ids", c_void_p), ("chances", c_void_p), ("entering", c_int32), ("narrow", c_int32), ("spoken", c_int32),
        ("k", c_int32),
    ]  # fmt: skip


class MixerStruct(ctypes.Structure):
    _fields_ = [
        ("conv", c_void_p), ("conv_bias", c_void_p), ("step_bias", c_void_p), ("decay", c_void_p), ("skip", c_void_p),
        ("gate_norm", c_void_p), ("heads", c_int32), ("head_dim", c_int32), ("groups", c_int32), ("state", c_int32),
        ("kernel", c_int32), ("least_step", c_float), ("most_step", c_float), ("eps", c_float), ("rule", c_int32),
        ("in_turns", c_int32), ("slot_count", c_int32), ("slots", c_void_p), ("state_at", c_int64),
    ]  # fmt: skip


class MixedStruct(ctypes.Structure):
    _fields_ = [
        ("held", c_void_p), ("parents", c_void_p), ("state", c_void_p), ("after", c_void_p), ("gate", c_void_p),
        ("out", c_void_p), ("gate_stride", c_int64), ("reach", c_int32), ("rows", c_int32), ("said", c_int32),
    ]  # fmt: skip


class ExpectedStruct(ctypes.Structure):
    _fields_ = [
        ("keys", c_void_p * 3), ("rows", c_void_p * 3), ("rates", c_void_p), ("rated", c_void_p),
        ("hits", c_void_p * 2), ("tried", c_void_p * 2), ("text", c_void_p), ("past", c_void_p), ("ends", c_void_p),
        ("copied", c_void_p), ("noise", c_double), ("noise_mean", c_double), ("seed", c_uint64), ("position", c_int64),
        ("last", c_int64 * 3), ("width", c_int32), ("known", c_int32), ("ends_count", c_int32),
        ("copied_count", c_int32), ("repeated", c_int32), ("others", c_int32), ("asked", c_int32),
    ]  # fmt: skip


class ProposedStruct(ctypes.Structure):
    _fields_ = [
        ("texts", c_void_p), ("limits", c_void_p), ("depths", c_void_p), ("places", c_void_p), ("costs", c_void_p),
        ("own", c_void_p), ("weights", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("sizes", c_void_p),
        ("ends", c_void_p), ("next", c_void_p), ("given", c_double), ("promised", c_double), ("count", c_int32),
        ("cost_count", c_int32), ("stride", c_int32), ("nodes", c_int32),
    ]  # fmt: skip


class DraftingStruct(ctypes.Structure):
    _fields_ = [
        ("step", ProposedStruct), ("prices", c_void_p), ("costs", c_void_p), ("kept", c_void_p),
        ("promised", c_void_p), ("leads", c_void_p), ("weights", c_void_p), ("remembered", c_double),
        ("balance", c_double), ("share", c_double), ("look", c_double), ("ahead", c_double), ("exposed", c_double),
        ("margin", c_double), ("sequences", c_int32), ("nodes", c_int32), ("resting", c_int32), ("noted", c_int32),
        ("fruitless", c_int32), ("silent", c_int32), ("rests", c_int32), ("longest", c_int32), ("patience", c_int32),
        ("pause", c_int32), ("skipped", c_int32), ("drafted", c_int32),
    ]  # fmt: skip


class HappenedStruct(ctypes.Structure):
    _fields_ = [
        ("emitted", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("accepted", c_void_p),
        ("logits", c_void_p), ("count", c_int32), ("rows", c_int32), ("length", c_int32), ("failed", c_int32),
    ]  # fmt: skip


class ProcessorStruct(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p), ("counts", c_void_p), ("tail", c_void_p), ("biases", c_void_p), ("value", c_double),
        ("shape", c_int32), ("count", c_int32), ("tail_count", c_int32),
    ]  # fmt: skip


class SamplingStruct(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("first", c_void_p), ("seeds", c_void_p),
        ("positions", c_void_p), ("processors", c_void_p), ("processor_counts", c_void_p), ("greedy", c_void_p),
        ("padding", c_void_p), ("paths", c_void_p), ("accepted", c_void_p), ("chosen", c_void_p), ("texts", c_int32),
        ("vocab", c_int32), ("limit", c_int32), ("padding_count", c_int32),
    ]  # fmt: skip


class ArrayStepStruct(ctypes.Structure):
    _fields_ = [
        ("passed", PassStruct), ("sampling", SamplingStruct), ("last", c_void_p), ("next", c_void_p),
        ("positions", c_void_p), ("ends", c_void_p), ("depths", c_void_p), ("sizes", c_void_p), ("drafts", c_void_p),
        ("emitted", c_void_p), ("kept", c_void_p), ("choices", c_void_p), ("choice_counts", c_void_p),
        ("masks", c_void_p), ("table", c_void_p), ("cos", c_void_p * 2), ("sin", c_void_p * 2), ("scale", c_float),
        ("numbers", c_int32), ("blocks", c_int32), ("room", c_int32), ("stride", c_int32), ("full", c_int32),
        ("plain", c_int32), ("reach", c_int64),
    ]  # fmt: skip


class PricesStruct(ctypes.Structure):
    _fields_ = [
        ("factors", c_void_p), ("weights", c_void_p), ("counts", c_void_p), ("curves", c_void_p),
        ("outliers", c_void_p), ("made", c_void_p), ("read", c_double), ("row", c_double), ("token", c_double),
        ("row_token", c_double), ("text", c_double), ("machine", c_double), ("gain", c_double), ("steps", c_int64),
    ]  # fmt: skip


# As `decodery_size` in csrc/native.cpp.
_STRUCTS = (
    LinearStruct, LayerStruct, ModelStruct, PageRowsStruct, PolicyStruct, SegmentStruct, PassStruct, DraftStruct,
    GuessStruct, MixerStruct, MixedStruct, ExpectedStruct, ProposedStruct, DraftingStruct, HappenedStruct,
    ProcessorStruct, SamplingStruct, ArrayStepStruct, PricesStruct, ExpertsStruct, LatentStruct, TokenInputsStruct,
)  # fmt: skip


_NEWEST = (
    "decodery_pack_codes",
    "decodery_copy_pages",
    "decodery_choose_tokens",
    "decodery_learn_step",
    "decodery_prices",
    "decodery_copies",
    "decodery_draft_all",
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels with as many threads as PyTorch uses, or None where they were not built.

    Raises:
        CorruptFile: If they were built from other sources than this file belongs to.
    """
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        return None
    try:
        lib = ctypes.CDLL(str(path))
    except OSError:
        return None
    check_layout(lib, path)
    lib.decodery_kernels.restype = c_char_p
    lib.decodery_read.restype = c_double
    lib.decodery_read.argtypes = [c_void_p, c_int64]
    lib.decodery_pack.argtypes = [c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack_ternary.argtypes = [c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack_blocks.argtypes = [c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack_supers.argtypes = [c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack8.argtypes = [c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack_codes.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack16.argtypes = [c_int32, c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    lib.decodery_pack_rows.argtypes = [c_int32, c_void_p, c_int32, c_int32, c_int64, c_void_p]
    lib.decodery_expand_rows.argtypes = [c_int32, c_void_p, c_int32, c_int32, c_void_p]
    lib.decodery_room.restype = c_int64
    lib.decodery_room.argtypes = [c_void_p, c_void_p]
    lib.decodery_layers.argtypes = [c_void_p, c_void_p, c_void_p]
    lib.decodery_norm.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    lib.decodery_head.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    lib.decodery_linear.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    lib.decodery_topk.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p]
    lib.decodery_likeliest.argtypes = lib.decodery_topk.argtypes
    lib.decodery_race.argtypes = [c_void_p, c_int32, c_uint64, c_int32, c_void_p]
    lib.decodery_draft.argtypes = [c_void_p, c_void_p]
    lib.decodery_mix.argtypes = [c_void_p, c_void_p]
    lib.decodery_ngrams.restype = c_void_p
    lib.decodery_ngrams.argtypes = [c_void_p, c_int32, c_int32]
    lib.decodery_ngrams_size.restype = c_int64
    for called in (lib.decodery_ngrams_free, lib.decodery_ngrams_clear, lib.decodery_ngrams_size):
        called.argtypes = [c_void_p]
    lib.decodery_ngrams_extend.argtypes = [c_void_p, c_void_p, c_int64]
    lib.decodery_copies.restype = c_int32
    lib.decodery_copies.argtypes = [*[c_void_p] * 5, c_int32, c_int32, c_void_p]
    lib.decodery_copies_follow.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    lib.decodery_propose.argtypes = [c_void_p]
    lib.decodery_learn.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_int32]
    lib.decodery_learn_step.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_void_p]
    lib.decodery_draft_all.argtypes = [c_void_p, c_double, c_int32]
    lib.decodery_drafts_learn.argtypes = [c_void_p, c_void_p, c_double, c_int32, c_void_p]
    lib.decodery_follow.argtypes = [c_void_p, c_void_p, c_void_p, c_int32]
    lib.decodery_read_rows.argtypes = lib.decodery_write_rows.argtypes = [c_void_p]
    lib.decodery_copy_pages.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64]
    lib.decodery_prices.argtypes = [c_void_p, c_int32, c_double, c_int32, c_void_p]
    lib.decodery_price.argtypes = [c_void_p, c_int32, c_int32, c_double, c_double]
    lib.decodery_sample.argtypes = [c_void_p]
    for called in (lib.decodery_prepare, lib.decodery_choose_tokens, lib.decodery_step):
        called.argtypes = [c_void_p, c_void_p]
    lib.decodery_keep.argtypes = [c_void_p, c_void_p, c_int32]
    lib.decodery_allow.argtypes = [c_int32]
    lib.decodery_threads(torch.get_num_threads())
    return lib


@contextmanager
def threads_at_most(count: int) -> Iterator[None]:
    """Within it, native passes of the calling thread take so many threads at most: others run beside them."""
    lib = library()
    if lib is not None:
        lib.decodery_allow(count)
    try:
        yield
    finally:
        if lib is not None:
            lib.decodery_allow(0)


def check_layout(lib: object, path: Path) -> None:
    """Raise CorruptFile unless `lib` has the structs of this file: it would read and write wrong places."""
    # A library without the newest functions is older than this file.
    size = getattr(lib, "decodery_size", None) if all(hasattr(lib, name) for name in _NEWEST) else None
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


def vectorised() -> bool:
    """Whether there are kernels for this machine's own vector instructions."""
    return len(kernel_sets()) > 1


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
    """Fastest streaming read of a buffer larger than the caches by all threads, in GB/s (1e9 bytes/s)."""
    buffer = torch.ones(mebibytes * 2**20 // 8, dtype=torch.float64, device="cpu")
    size = buffer.nbytes
    lib = library()
    if lib is None:
        return max(size / seconds for seconds in _sum_times(buffer, rounds)) / 1e9
    return max(size / lib.decodery_read(address(buffer, torch.float64, None), size) for _ in range(rounds)) / 1e9


def _sum_times(buffer: torch.Tensor, rounds: int) -> list[float]:
    from time import perf_counter

    times = []
    for _ in range(rounds):
        begin = perf_counter()
        buffer.sum()
        times.append(perf_counter() - begin)
    return times


def address(numbers: Numbers, dtype: torch.dtype | type[np.generic], *shape: int | None, apart: bool = False) -> int:
    """Where numbers begin that a kernel reads or writes as `dtype`, on the CPU and one after another.

    Args:
        numbers: a tensor, or a numpy array; the caller keeps it alive until the kernel has returned.
        dtype: what the kernel takes them for; of numpy for an array.
        shape: their shape; None stands for any size.
        apart: let everything but the last dimension be further apart, as the kernel is given its strides.

    Returns:
        The address.

    Raises:
        ValueError: the kernel would read or write something else.
    """
    if isinstance(numbers, torch.Tensor):
        lies = numbers.device.type == "cpu" and (numbers.is_contiguous() or (apart and numbers.stride(-1) == 1))
        place = numbers.data_ptr() if lies else 0
    else:
        lies = numbers.flags.c_contiguous or (apart and numbers.strides[-1] == numbers.itemsize)
        place = numbers.ctypes.data
    known = numbers.shape
    fits = known == shape or (
        len(known) == len(shape)
        and [each if size is None else size for size, each in zip(shape, known, strict=True)] == [*known]
    )
    if not lies or not fits or numbers.dtype != dtype:
        sizes = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"a kernel was given {numbers.dtype} {list(numbers.shape)}{'' if lies else ', not in order on the CPU'}: "
            f"it takes {dtype} {sizes}, contiguous on the CPU"
        )
    return place


def check(code: int) -> None:
    """Raise OutOfMemory where a kernel says that there was none for what it works in."""
    if code:
        raise OutOfMemory("no memory for the working buffers of a pass: use a shorter chunk or fewer sequences at once")
