"""Quantized weights of a GGUF file that are read where they lie: no copy of them is kept on disk, and one in memory.

The native kernels lay blocks out in panels straight from the mapped file, whose pages are given back then. Whoever
wants the numbers of a layer themselves (a transformation, a test) gets them unpacked anew each time.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from decodery.core.errors import CorruptFile
from decodery.core.mapped_memory import discard
from decodery.core.native.kernels import Form, address, library

from ..native.block_linear import BlockLinear
from ..native.floats import MXFP4Linear
from ..native.int4 import Int4Linear
from ..native.packed import SUPER_BYTES, panel_bytes
from ..native.super_blocks import BlockKind, SuperBlockLinear, block_layer
from ..torch.rope import head_order
from ..torch.weights import Weights
from .gguf_blocks import NUMBERS, READ, SIZES

if TYPE_CHECKING:
    from ..native.packed import Packed

IN_PLACE = "in_place"
"""What the metadata of a copy calls the plan of what is not in it."""


@dataclass(frozen=True)
class Piece:
    """A matrix of blocks in the file.

    Attributes:
        kind: Name of its GGML type.
        begin: Of its first byte.
        turned: 0, or how many rows a head has whose rotated pairs are to be put in halves.
        rotated: How many of these rows are rotated, 0 for all of them.
        paired: Whether rotated pairs lie side by side there, or in halves of those that are rotated.
        size, apart: Where other parts lie between: `size` of every `apart` rows from the first one on are this one's.
    """

    kind: str
    begin: int
    rows: int
    inputs: int
    turned: int = 0
    rotated: int = 0
    paired: bool = True
    size: int = 0
    apart: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """All that is counted."""
        return self.begin, self.rows, self.inputs, self.turned, self.rotated, self.size, self.apart

    @property
    def spanned(self) -> int:
        """Rows from the first one to the last one, others between them included."""
        return self.rows + (self.rows // self.size - 1) * (self.apart - self.size) if self.size else self.rows

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        block, size = SIZES[self.kind]
        return self.inputs // block * size

    @property
    def end(self) -> int:
        """After its last byte."""
        return self.begin + self.spanned * self.row_bytes

    def places(self) -> np.ndarray:
        """[rows] where each row begins, in our order."""
        rows = np.arange(self.rows)
        if self.turned:
            order = head_order(self.turned, self.rotated or self.turned, paired=self.paired).numpy()
            rows = (rows.reshape(-1, self.turned)[:, :1] + order).ravel()
        if self.size:
            rows = rows // self.size * self.apart + rows % self.size
        return self.begin + rows * self.row_bytes


@dataclass(frozen=True)
class Plan:
    """What is read in place of a file of `size` bytes: by slot name, the pieces it is stacked from."""

    size: int
    slots: dict[str, tuple[Piece, ...]]

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str, origin: Path) -> Plan:
        """What `text` gave.

        Raises:
            CorruptFile: If it says what no file can hold.
        """
        try:
            raw = json.loads(text)
            found = {name: tuple(Piece(**piece) for piece in pieces) for name, pieces in raw["slots"].items()}
            plan = cls(raw["size"], found)
            plan._check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFile(f"{origin} does not say what is read in place: get or make that file again") from error
        return plan

    def _check(self) -> None:
        for pieces in self.slots.values():
            kinds = {(piece.kind, piece.inputs) for piece in pieces}
            whole = all(type(n) is int for each in pieces for n in each.numbers)
            if type(self.size) is not int or not whole or len(kinds) != 1:
                raise ValueError("pieces of one slot differ")
            for piece in pieces:
                fits = piece.kind in READ and piece.begin >= 0 and piece.rows > 0 and piece.inputs > 0
                if not fits or piece.inputs % SIZES[piece.kind][0] or piece.end > self.size or piece.turned % 2:
                    raise ValueError("a piece lies outside of the file")
                if not 0 <= piece.rotated <= piece.turned or piece.rotated % 2 or type(piece.paired) is not bool:
                    raise ValueError("more of a head is rotated than there is")
                if piece.size and not (0 < piece.size <= piece.apart and piece.rows % piece.size == 0):
                    raise ValueError("parts do not take turns")
                if piece.turned and (piece.turned < 0 or piece.rows % piece.turned):
                    raise ValueError("heads do not divide the rows")


class File:
    """A mapped file that a plan was made for.

    Raises:
        CorruptFile: If it has another size by now.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptFile(f"cannot read {path}: {error}") from error
        if len(self._data) != plan.size:
            raise CorruptFile(f"{path} has {len(self._data)} bytes where it had {plan.size}: it was cut or exchanged")
        self._bytes = np.frombuffer(self._data, np.uint8)
        self.address = self._bytes.ctypes.data

    def raw(self, piece: Piece) -> np.ndarray:
        """[spanned, bytes of a row], in the file's order."""
        return self._bytes[piece.begin : piece.end].reshape(piece.spanned, -1)


class Rows:
    """The rows of a slot: those of its pieces one after another."""

    def __init__(self, file: File, pieces: Sequence[Piece]) -> None:
        self.kind, self.inputs = pieces[0].kind, pieces[0].inputs
        self._file, self._pieces = file, pieces

    @cached_property
    def addresses(self) -> np.ndarray:
        """[rows] uint64 where each row lies in memory."""
        places = [piece.places() for piece in self._pieces]
        return (np.concatenate(places) + self._file.address).astype(np.uint64)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, inputs)"""
        return sum(piece.rows for piece in self._pieces), self.inputs

    def some(self, first: int, count: int) -> Rows:
        """The rows [first, first + count), which are whole pieces."""
        begins = np.cumsum([0, *(piece.rows for piece in self._pieces)])
        begin, end = np.searchsorted(begins, (first, first + count))
        assert (begins[begin], begins[end]) == (first, first + count), "an expert is cut"
        return Rows(self._file, self._pieces[begin:end])

    def pack(self, order: np.ndarray, packed: int) -> None:
        """Lay rows out in panels at an address, and give the file's pages back.

        Args:
            order: [n] rows, -1 for padding.
        """
        lib = library()
        assert lib is not None
        addresses = np.where(order >= 0, self.addresses[np.maximum(order, 0)], np.uint64(0)).astype(np.uint64)
        size = panel_bytes(READ[self.kind].form, self.inputs)
        rows = addresses.ctypes.data
        lib.decodery_pack_rows(NUMBERS[self.kind], rows, self.inputs, len(order), size, packed)
        for piece in self._pieces:
            discard(self._file.address + piece.begin, self._file.address + piece.end)

    @property
    def number(self) -> int:
        """Of the type of blocks, by GGML's numbers."""
        return NUMBERS[self.kind]

    def expanded(self, rows: np.ndarray | None = None) -> torch.Tensor:
        """[n, inputs] float32 what these rows stand for, all of them by default."""
        lib = library()
        assert lib is not None
        addresses = np.ascontiguousarray(self.addresses if rows is None else self.addresses[rows])
        found = torch.empty(len(addresses), self.inputs, dtype=torch.float32, device="cpu")
        read, written = address(addresses, np.uint64, None), address(found, torch.float32, *found.shape)
        lib.decodery_expand_rows(NUMBERS[self.kind], read, len(addresses), self.inputs, written)
        return found

    def layer(self) -> BlockKind:
        """The numbers as they are, unpacked."""
        form, read = READ[self.kind]
        stacks: tuple[list[torch.Tensor], ...] = ([], [], [])
        for piece in self._pieces:
            raw = self._file.raw(piece)
            order = (piece.places() - piece.begin) // piece.row_bytes
            with np.errstate(all="ignore"):
                parts = read(raw[order])
            for stack, part in zip(stacks, parts, strict=True):
                stack.append(torch.from_numpy(part))
        weight, first, second = map(torch.cat, stacks)
        return block_layer(form, weight, first, second)


class InPlace:
    """A linear layer over rows in the file; its tensors are made anew on request."""

    rows: Rows
    bias: torch.Tensor | None

    def __init__(self, rows: Rows, bias: torch.Tensor | None = None) -> None:
        self.rows, self.bias = rows, bias
        self._packed: Packed | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.rows.shape

    def unpacked(self) -> Any:
        """The same layer with tensors of its own."""
        layer = self.rows.layer()
        layer.bias = self.bias
        return layer

    def some(self, outputs: torch.Tensor) -> Any:
        """Only these outputs [k], in this order, with tensors of their own."""
        return self.unpacked().some(outputs)

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        dense: torch.Tensor = self.unpacked().dense()
        return dense

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        result: torch.Tensor = self.unpacked().portable(rows)
        return result

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept: dict[str, torch.Tensor] = self.unpacked().tensors()
        return kept


class Int4InPlace(InPlace, Int4Linear):
    """An `Int4Linear` over rows in the file."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """As `Int4Linear.weight`, unpacked."""
        return self.rows.layer().weight

    @property
    def step(self) -> torch.Tensor:  # type: ignore[override]
        """As `Int4Linear.step`, unpacked."""
        return self.unpacked().step

    @property
    def least(self) -> torch.Tensor:  # type: ignore[override]
        """As `Int4Linear.least`, unpacked."""
        return self.unpacked().least


class BlocksInPlace(InPlace, BlockLinear):
    """A `BlockLinear` over rows in the file."""

    @property
    def form(self) -> Form:
        """What kernels call it."""
        return READ[self.rows.kind].form

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """As `BlockLinear.weight`, unpacked."""
        return self.rows.layer().weight

    @property
    def scales(self) -> torch.Tensor:  # type: ignore[override]
        """As `BlockLinear.scales`, unpacked."""
        return self.unpacked().scales


class MXFP4InPlace(InPlace, MXFP4Linear):
    """An `MXFP4Linear` over rows in the file."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """As `MXFP4Linear.weight`, unpacked."""
        return self.rows.layer().weight

    @property
    def exponents(self) -> torch.Tensor:  # type: ignore[override]
        """As `MXFP4Linear.exponents`, unpacked."""
        return self.unpacked().exponents


class SupersInPlace(InPlace, SuperBlockLinear):
    """A `SuperBlockLinear` over rows in the file."""

    @property
    def form(self) -> Form:  # type: ignore[override]
        """What kernels call it."""
        return READ[self.rows.kind].form

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """As `SuperBlockLinear.weight`, unpacked."""
        return self.unpacked().weight

    @property
    def scales(self) -> torch.Tensor:  # type: ignore[override]
        """As `SuperBlockLinear.scales`, unpacked."""
        return self.unpacked().scales

    @property
    def integers(self) -> torch.Tensor:  # type: ignore[override]
        """As `SuperBlockLinear.integers`, unpacked."""
        return self.unpacked().integers


def in_place(
    rows: Rows, bias: torch.Tensor | None = None
) -> Int4InPlace | BlocksInPlace | MXFP4InPlace | SupersInPlace:
    """The linear layer over rows of a file."""
    form = READ[rows.kind].form
    if form in SUPER_BYTES:
        return SupersInPlace(rows, bias)
    if form == Form.MXFP4:
        return MXFP4InPlace(rows, bias)
    return (Int4InPlace if form == Form.BLOCKS4 else BlocksInPlace)(rows, bias)


class WeightsInPlace(Weights):
    """Weights whose embeddings are looked up in the file; the whole table is made on request."""

    def __init__(self, *args: Any, table: Rows | None = None, **others: Any) -> None:
        self._table, self._whole = table, cast("torch.Tensor | None", None)
        super().__init__(*args, **others)

    @property
    def table(self) -> Rows | None:
        """The rows of embeddings in the file, None where the whole table is there."""
        return self._table if self._whole is None else None

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden] bfloat16, kept from then on."""
        if self._whole is None:
            assert self._table is not None
            parts = [self._table.expanded(some).bfloat16() for some in _spans(self._table.shape[0])]
            self._whole = torch.cat(parts)
        return self._whole

    @embedding.setter
    def embedding(self, table: torch.Tensor | None) -> None:
        self._whole = table

    @property
    def tokens(self) -> int:
        """See `Weights.tokens`."""
        return len(self.embedding) if self._table is None else self._table.shape[0]

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Weights.rows`."""
        if self._table is None or self._whole is not None:
            return super().rows(tokens)
        return self._table.expanded(tokens.numpy().ravel()).bfloat16().view(*tokens.shape, -1)


def _spans(rows: int, step: int = 4096) -> list[np.ndarray]:
    return [np.arange(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
