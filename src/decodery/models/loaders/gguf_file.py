"""The GGUF container: metadata and (quantized) tensors of a file that may be truncated, damaged or hostile."""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel

from .gguf_blocks import READ, Blocks

# Far above any real file (262,144 tokens, 50 keys, 2,000 tensors), low enough that a hostile header costs nothing.
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 17
_MOST_ELEMENTS = 1 << 22
_MOST_HEADER = 1 << 26
_CHUNK = 1 << 20

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
EXPERTS = ("_exps.weight", "altup_proj.weight", "altup_unembd_proj.weight")
"""How the names of tensors end that hold a matrix of each expert, or of each stream."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: Rows first.
        kind: The number of its GGML type.
        offset: Of its first byte in data.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    data: mmap.mmap

    @property
    def flat(self) -> TensorInfo:
        """The same as one matrix of all rows."""
        return replace(self, shape=(math.prod(self.shape[:-1]), self.shape[-1]))


class GGUFFile:
    """An opened file.

    Args:
        others: The parts after the first one of a split file, whose tensors are among those of the first.
        metadata: {key: str, number, bool, list or array}.
        tensors: {name: TensorInfo}.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.others: list[GGUFFile] = []
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise CorruptFile(f"{path} is empty: fetch it again, or give another file")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptFile(f"cannot read {path}: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read_header()

    @classmethod
    def whole(cls, path: Path) -> GGUFFile:
        """A file with all of its parts, of which `path` is the first where there are several.

        Raises:
            CorruptFile: A part is missing, or belongs to another file.
        """
        first = cls(path)
        for number, part in enumerate(parts_of(path)[1:], start=1):
            other = cls(part)
            told = other.metadata.get("split.no"), other.metadata.get("split.count")
            if told != (number, first.metadata.get("split.count")) or first.tensors.keys() & other.tensors.keys():
                raise CorruptFile(f"{part} is no part of {path}: fetch all parts again")
            first.others.append(other)
            first.tensors |= other.tensors
        count, parts = first.metadata.get("split.count", 1), 1 + len(first.others)
        tensors = first.metadata.get("split.tensors.count", len(first.tensors))
        counts = isinstance(count, int) and isinstance(tensors, int)
        if not counts or max(count, 1) != parts or tensors != len(first.tensors):
            raise CorruptFile(
                f"{path} is one of {count} parts with {tensors} tensors, and {parts} with {len(first.tensors)} are "
                "here: keep all parts in one folder, under names that end in -00001-of-0000N.gguf"
            )
        return first

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self._data) + sum(other.size for other in self.others)

    def close(self) -> None:
        for other in self.others:
            other.close()
        self._data.close()

    def kind_name(self, name: str) -> str:
        """The name of a tensor's GGML type, such as "Q4_K"."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.info(name).kind).name

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows of a tensor as float32, their quantized blocks expanded; numbers of one that has one dimension."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self._matrix(name)
        kind = GGMLQuantizationType(info.kind)
        raw = self._raw(info, begin, end)
        result = np.empty((len(raw), info.shape[-1]), dtype=np.float32)

        def expand(start: int, step: int) -> None:
            # A damaged block may hold an infinite scale; what comes of it shows in the logits, not as a warning.
            with np.errstate(all="ignore"):
                result[start : start + step] = dequantize(raw[start : start + step], kind)

        try:
            _side_by_side(expand, raw, info.shape[-1])
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is of type {kind.name}, which is unknown here"
            ) from error
        return result[0][begin:end] if len(info.shape) == 1 else result.reshape(-1, *info.shape[1:])

    def integers(self, name: str) -> np.ndarray:
        """A tensor of one dimension that holds integers, as int64.

        Raises:
            UnsupportedModel: It holds others.
        """
        if (kind := self.kind_name(name)) not in ("I32", "I64"):
            raise UnsupportedModel(f"{self.path}: tensor {name} is of type {kind}, and should be of integers")
        return self._raw(self.info(name), 0, None).view(np.int64 if kind == "I64" else np.int32)[0].astype(np.int64)

    def blocks(self, name: str, begin: int, end: int) -> Blocks:
        """Rows of a matrix whose type is one of `gguf_blocks.READ`, its numbers as they are."""
        info, read = self._matrix(name), READ[self.kind_name(name)].read
        raw = self._raw(info, begin, end)
        found: dict[int, Blocks] = {}

        def unpack(start: int, some: int) -> None:
            with np.errstate(all="ignore"):
                found[start] = read(raw[start : start + some])

        _side_by_side(unpack, raw, info.shape[-1])
        numbers, first, second = (
            np.concatenate(each) for each in zip(*(found[at] for at in sorted(found)), strict=True)
        )
        return numbers, first, second

    def info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CorruptFile(f"{self.path} has no tensor {name}: the file is incomplete")
        return info

    def _matrix(self, name: str) -> TensorInfo:
        """Where a tensor lies, those of all experts as one matrix."""
        info = self.info(name)
        return info.flat if name.endswith(EXPERTS) else info

    def _raw(self, info: TensorInfo, begin: int, end: int | None) -> np.ndarray:
        """[rows, bytes of a row]; all of a tensor that has one dimension."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
        row_bytes = info.shape[-1] // block * size
        inner = int(np.prod(info.shape[1:-1], dtype=np.int64)) if len(info.shape) > 1 else 1
        first, last = (begin, info.shape[0] if end is None else end) if len(info.shape) > 1 else (0, 1)
        rows, start = (last - first) * inner, info.offset + first * inner * row_bytes
        return np.frombuffer(info.data, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)

    def _read_header(self) -> None:
        reader = _Reader(self._data, self.path)
        magic, version = reader.unpack("<4sI")
        if magic != b"GGUF":
            raise CorruptFile(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF")
        if version not in (2, 3):
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UnsupportedModel(f"{self.path} is a {what} GGUF file: only little-endian versions 2 and 3 are read")
        tensor_count, key_count = reader.unpack("<QQ")
        if key_count > _MOST_KEYS or tensor_count > _MOST_TENSORS:
            raise CorruptFile(f"{self.path} claims {key_count} metadata keys and {tensor_count} tensors: it is damaged")
        for _ in range(key_count):
            key = reader.string()
            if key in self.metadata:
                raise CorruptFile(f"{self.path} says {key} twice: it is damaged")
            (kind,) = reader.unpack("<I")
            self.metadata[key] = reader.value(kind)
        infos = [(reader.string(), *reader.tensor_info()) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise CorruptFile(f"{self.path}: general.alignment is {alignment!r}: the file is damaged")
        start = -(-reader.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add(name, shape, kind, start + offset)

    def _add(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise UnsupportedModel(f"{self.path}: tensor {name} is of the unknown type {kind}") from None
        elements = 1
        for length in shape:
            elements *= length
        if not shape or elements == 0 or shape[-1] % block or name in self.tensors:
            raise CorruptFile(f"{self.path}: tensor {name} has the impossible shape {list(shape)}: it is damaged")
        if offset + elements // block * size > len(self._data):
            raise CorruptFile(f"{self.path} ends before the data of tensor {name}: it was not downloaded completely")
        self.tensors[name] = TensorInfo(shape, kind, offset, self._data)


def parts_of(path: Path) -> list[Path]:
    """The files of a model of which `path` is the first, or the only one.

    Raises:
        CorruptFile: A part is missing.
        SettingsError: `path` is not the first part.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, count = found[1], int(found[2]), int(found[3])
    names = [path.with_name(f"{stem}-{each:05}-of-{count:05}.gguf") for each in range(1, count + 1)]
    if number != 1:
        raise SettingsError(f"{path.name} is part {number} of {count}: give the first one, {names[0].name}")
    if missing := next((each for each in names if not each.is_file()), None):
        raise CorruptFile(
            f"{missing.name}, one of the {count} parts of {path.name}, is missing: put it beside the others"
        )
    return names


def _side_by_side(work: Callable[[int, int], None], raw: np.ndarray, inputs: int) -> None:
    """`work(start, rows)` over all rows, some at a time, on all cores."""
    step = max(1, _CHUNK // inputs)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda start: work(start, step), range(0, len(raw), step)))


class _Reader:
    """Reads the header front to back; every length is checked against what is left before anything is made of it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0
        self.end = min(len(data), _MOST_HEADER)

    def take(self, size: int) -> int:
        """Move on by `size` bytes; returns where they begin."""
        start = self.at
        if size > self.end - start:
            raise CorruptFile(f"{self.path} ends inside its header: it is truncated or damaged")
        self.at = start + size
        return start

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (size,) = self.unpack("<Q")
        start = self.take(size)
        # Some converters cut long texts in the middle of a character.
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(kind, 1)[0].item()
        kind, count = self.unpack("<IQ")
        if count > _MOST_ELEMENTS:
            raise CorruptFile(f"{self.path} claims a list of {count} values: it is damaged")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise CorruptFile(f"{self.path} has a metadata value of the unknown kind {kind}: it is damaged")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.data, dtype, count, self.take(dtype.itemsize * count)).copy()

    def tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        """Shape with rows first, type and offset of a tensor."""
        (dimensions,) = self.unpack("<I")
        if dimensions > 4:
            raise CorruptFile(f"{self.path} has a tensor of {dimensions} dimensions: it is damaged")
        shape = self.unpack(f"<{dimensions}Q")
        kind, offset = self.unpack("<IQ")
        return tuple(reversed(shape)), kind, offset
