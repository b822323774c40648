"""The native kernels: found, loaded and called without PyTorch's headers, through a plain C interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch

from ..errors import CorruptFile, OutOfMemory
from ..mapped_memory import anonymous
from .structs import (
    ArrayStepStruct,
    DraftingStruct,
    DraftStruct,
    ExpectedStruct,
    ExpertsStruct,
    GuessStruct,
    HappenedStruct,
    LatentStruct,
    LayerStruct,
    LinearStruct,
    LostStruct,
    MixedStruct,
    MixerStruct,
    ModelStruct,
    PageRowsStruct,
    PassStruct,
    PolicyStruct,
    PricesStruct,
    ProcessorStruct,
    ProposedStruct,
    SamplingStruct,
    SealedGroupsStruct,
    SegmentStruct,
    StreamLayerStruct,
    StreamsStruct,
    TokenInputsStruct,
)

Numbers = torch.Tensor | np.ndarray


class Form(IntEnum):
    """How the weights of a linear layer are kept: `Form` in csrc/abi.h."""

    ROWS8, ROWS2, BLOCKS4, TABLE4, BLOCKS5, BLOCKS6, BLOCKS8, BFLOAT16, FLOAT16 = range(9)
    SUPER4, SUPER_TABLE4, SUPER5, SUPER6 = range(9, 13)
    FLOAT4, FLOAT8, CODES4, MXFP4 = range(13, 17)


LAYOUT = 1
"""`form_layout` in csrc/abi.h: libraries that lay forms out in another way are refused."""


class Rule(IntEnum):
    """How a layer's state goes on from row to row: `Rule` in csrc/abi.h."""

    MAMBA2, GATED_DELTA, GATED_CONV, MAMBA1 = range(4)


# As `decodery_size` in csrc/native.cpp.
_STRUCTS = (
    LinearStruct, LayerStruct, ModelStruct, PageRowsStruct, PolicyStruct, SegmentStruct, PassStruct, DraftStruct,
    GuessStruct, MixerStruct, MixedStruct, ExpectedStruct, ProposedStruct, DraftingStruct, HappenedStruct,
    ProcessorStruct, SamplingStruct, ArrayStepStruct, PricesStruct, ExpertsStruct, LatentStruct, TokenInputsStruct,
    StreamsStruct, StreamLayerStruct, SealedGroupsStruct, LostStruct,
)  # fmt: skip


_NEWEST = (
    "decodery_pack_codes",
    "decodery_copy_pages",
    "decodery_choose_tokens",
    "decodery_learn_step",
    "decodery_prices",
    "decodery_copies",
    "decodery_draft_all",
    "decodery_lose_slots",
    "decodery_softmax_sums",
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
    lib.decodery_most_likely.argtypes = lib.decodery_topk.argtypes
    lib.decodery_softmax_sums.argtypes = [c_void_p, c_int32, c_int32, c_void_p]
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
    lib.decodery_lose_slots.argtypes = [c_void_p]
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
    """Raise CorruptFile unless a library has the structs and forms of this file.

    It would read and write wrong places.

    Args:
        lib: The library.
        path: Where it lies.
    """
    # A library without the newest functions is older than this file.
    size = getattr(lib, "decodery_size", None) if all(hasattr(lib, name) for name in _NEWEST) else None
    ours = [ctypes.sizeof(struct) for struct in _STRUCTS] + [len(Form), LAYOUT, 0]
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
    # Where weights lie: on huge pages it is read faster.
    buffer = torch.frombuffer(anonymous(mebibytes * 2**20), dtype=torch.float64).fill_(1.0)
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
