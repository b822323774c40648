"""From a checkpoint's parts to the fused form of `Weights` in a file: some rows in memory at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from decodery.core.errors import CorruptFile
from decodery.core.native.kernels import Form

from ..config import ModelConfig
from ..families.tensor_names import kept_wide
from ..native.int4 import Int4Linear
from ..native.int8 import Int8Linear
from ..native.packed import BITS, BLOCK, CODE_GROUP, FLOAT_GROUP, SUPER, SUPER_BYTES
from ..native.super_blocks import has_least
from .fused_slots import TABLES, Slot, slots
from .in_place import IN_PLACE, Piece, Plan
from .quantized.weight import Native
from .store import Progress, replacing

if TYPE_CHECKING:
    from .gguf_model import GGUFCheckpoint

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}
_NAMES |= {torch.int32: "I32"}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {Form.ROWS8: "int8", Form.BFLOAT16: "bfloat16", Form.FLOAT16: "float16"}
"""Forms that are not blocks, by what they are called."""
_CHUNK = 1 << 22
"""Numbers that are converted at a time."""

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""By names, the types and shapes of a file's tensors."""
_Kept = str | Form
"""A floating point type, "int8", or a form of blocks."""


class Parts(Protocol):
    """Where parts come from, by names such as "embedding.weight" or "layers.3.q.bias"."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a part.

        Raises:
            CorruptFile: If there is none.
        """
        ...

    def part(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of a part in any float dtype."""
        ...

    def forms(self, name: str) -> tuple[Form, ...]:
        """The forms in which a part's numbers stay as they are, the one of fewest bytes first."""
        ...

    def blocks(self, name: str, begin: int, end: int, form: Form) -> Native:
        """Rows of a part in one of these forms, but for those of 16 bits."""
        ...

    def columns(self, slot: str) -> torch.Tensor | None:
        """[in] which input each column of a slot's blocks belongs to, None for the inputs in turn."""
        ...


def write(
    path: Path,
    config: ModelConfig,
    precision: str,
    parts: Parts,
    *,
    progress: Progress,
    beside: GGUFCheckpoint | None = None,
) -> None:
    """Write the weights to `path`.

    A checkpoint's own blocks stay as they are: in int8 those of more than four bits, in int4 all of them where some
    have four, as a layer has more bits for a reason. What is fused of parts in different blocks is int8 there, and so
    is a head that has eight bits.

    Args:
        precision: "float32", "bfloat16" or "float16", where `kept_wide` names what is float32 all the same; or "int8"
            or "int4" for the linear layers: then the embedding, whose rows are only looked up, is bfloat16, and all
            else float32.
        beside: The file of `parts`, of which what need not be changed is to be read in place: it is only noted where.
    """
    quantized = precision not in FLOATS
    stored = [slot for slot in slots(config) if quantized or slot.name != "head.weight" or not config.tie_embeddings]
    kinds = _kept_as(stored, precision, parts, config)
    placed = None if beside is None else Plan(beside.size, dict(_placed(stored, kinds, beside)))
    if placed is not None:
        stored = [slot for slot in stored if slot.name not in placed.slots]
    plan = {name: entry for slot in stored for name, entry in _layout(slot, kinds[slot]).items()}
    columns = _columns(stored, kinds, parts)
    plan |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in columns.items()}
    for slot in stored:
        _check_shapes(slot, [parts.shape(name) for name in slot.parts])
    with replacing(path) as temporary, temporary.open("wb") as file:
        offsets = write_header(file, plan, {} if placed is None else {IN_PLACE: placed.text()})
        total = max(offset + _size(*plan[name]) for name, offset in offsets.items())
        done = 0
        for name, tensor in columns.items():
            file.seek(offsets[name])
            file.write(tensor.numpy().data)
        for slot in stored:
            first = 0
            for name in slot.parts:
                rows = parts.shape(name)[0]
                step = max(1, _CHUNK * slot.shape[0] // _size(torch.uint8, slot.shape))
                for begin in range(0, rows, step):
                    end = min(begin + step, rows)
                    for key, tensor in _tensors(slot, kinds[slot], parts, name, begin, end).items():
                        dtype, shape = plan[key]
                        file.seek(offsets[key] + (first + begin) * _size(dtype, shape[1:]))
                        file.write(tensor.contiguous().view(torch.uint8).numpy().data)
                        done += tensor.numel() * tensor.itemsize
                    progress("converting", done, total)
                first += rows


def _placed(
    stored: Sequence[Slot], kinds: dict[Slot, _Kept], file: GGUFCheckpoint
) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """By name, the slots that are read where they lie: all their parts are of one type that stays as it is."""
    for slot in stored:
        if slot.name in TABLES or kinds[slot] in _shared(file, slot):
            pieces = [piece for name in slot.parts if (piece := file.piece(name)) is not None]
            if len(pieces) == len(slot.parts) and len({piece.kind for piece in pieces}) == 1:
                yield slot.name, tuple(pieces)


def _kept_as(stored: Sequence[Slot], precision: str, parts: Parts, config: ModelConfig) -> dict[Slot, _Kept]:
    """What each slot is kept in, in a model of this precision."""
    if precision in FLOATS:
        return {slot: "float32" if kept_wide(slot.parts[0], config) else precision for slot in stored}
    found: dict[Slot, _Kept] = {
        slot: "bfloat16" if slot.name in TABLES or _is_narrow(slot, parts) else "float32"
        for slot in stored
        if not slot.linear
    }
    own = {slot: _shared(parts, slot) for slot in stored if slot.linear}
    fours = any(BITS.get(form) == 4 for slot in own for name in slot.parts for form in parts.forms(name))
    for slot, forms in own.items():
        if precision == "int8":
            forms = [form for form in forms if BITS.get(form, 8) > 4]
        elif not fours:
            forms = [] if slot.name == "head.weight" else [Form.BLOCKS4]
        form = next(iter(forms), Form.ROWS8)
        # The head chooses the tokens, and int8 is as fast there as fewer bits, and smaller than blocks of eight.
        if slot.name == "head.weight" and (BITS.get(form, 8) == 8 or not fours):
            form = Form.ROWS8
        found[slot] = _STORED.get(form, form)
    return found


def _columns(stored: Sequence[Slot], kinds: dict[Slot, _Kept], parts: Parts) -> dict[str, torch.Tensor]:
    """By name, the orders that slots of blocks have columns in, where blocks are the checkpoint's own."""
    found = {
        slot: parts.columns(slot.name)
        for slot in stored
        if isinstance(kinds[slot], Form) and kinds[slot] in _shared(parts, slot)
    }
    return {
        f"{slot.name.removesuffix('weight')}order": order.int() for slot, order in found.items() if order is not None
    }


def _is_narrow(slot: Slot, parts: Parts) -> bool:
    """Whether a slot is a large one that is read in floating point, and has 16 bits as it is."""
    return slot.name.endswith(".heads_up.weight") and parts.part(slot.parts[0], 0, 1).dtype == torch.bfloat16


def _shared(parts: Parts, slot: Slot) -> list[Form]:
    """The forms that all parts of a slot have, the one of fewest bytes first."""
    first, *others = (parts.forms(name) for name in slot.parts)
    return [form for form in first if all(form in other for other in others)]


def _layout(slot: Slot, kept: _Kept) -> Layout:
    """Names, types and shapes of the tensors a slot is stored as."""
    stem = slot.name.removesuffix("weight")
    if not isinstance(kept, Form):
        if kept == "int8":
            return {slot.name: (torch.int8, slot.shape), f"{stem}scale": (torch.float32, slot.shape[:1])}
        return {slot.name: (FLOATS[kept], slot.shape)}
    outputs, inputs = slot.shape
    if kept == Form.FLOAT8:
        groups = outputs, -(-inputs // FLOAT_GROUP)
        return {slot.name: (torch.uint8, slot.shape), f"{stem}group_scales": (torch.float32, groups)}
    weight, blocks = (torch.uint8, (outputs, inputs * BITS[kept] // 8)), (outputs, inputs // BLOCK)
    if kept in SUPER_BYTES:
        count, integers = (2, torch.uint8) if has_least(kept) else (1, torch.int8)
        scales = torch.float16, (outputs, inputs // SUPER, count)
        return {slot.name: weight, f"{stem}super_scales": scales, f"{stem}integers": (integers, (*blocks, 2))}
    if kept == Form.CODES4:
        return {slot.name: weight, f"{stem}code_scales": (torch.float32, (outputs, -(-inputs // CODE_GROUP)))}
    if kept == Form.FLOAT4:
        steps = (torch.float16, (outputs, inputs * 2 // BLOCK)), (torch.float32, (outputs,))
        return {slot.name: weight, f"{stem}half_steps": steps[0], f"{stem}scale": steps[1]}
    if kept == Form.MXFP4:
        return {slot.name: weight, f"{stem}exponents": (torch.uint8, blocks)}
    if kept == Form.BLOCKS4:
        return {slot.name: weight, f"{stem}step": (torch.float16, blocks), f"{stem}least": (torch.float16, blocks)}
    return {slot.name: weight, f"{stem}scales": (torch.float16, (*blocks, 1 if kept == Form.BLOCKS8 else 2))}


def _tensors(slot: Slot, kept: _Kept, parts: Parts, name: str, begin: int, end: int) -> dict[str, torch.Tensor]:
    """Rows of one part of a slot in the form of `_layout`."""
    stem = slot.name.removesuffix("weight")
    layer: Native
    if isinstance(kept, Form):
        own = kept in parts.forms(name)
        layer = parts.blocks(name, begin, end, kept) if own else Int4Linear.quantize(parts.part(name, begin, end))
    elif kept == "int8":
        own = Form.ROWS8 in parts.forms(name)
        layer = parts.blocks(name, begin, end, Form.ROWS8) if own else Int8Linear.quantize(parts.part(name, begin, end))
    else:
        return {slot.name: parts.part(name, begin, end).to(FLOATS[kept])}
    return {stem + key: tensor for key, tensor in layer.tensors().items()}


def _check_shapes(slot: Slot, shapes: list[tuple[int, ...]]) -> None:
    """Refuse parts that stacked do not have the shape that the configuration promises."""
    if len({shape[1:] for shape in shapes}) > 1:
        found = ", ".join(str(list(shape)) for shape in shapes)
        raise CorruptFile(f"the weights of {slot.name} do not fit together: they have the shapes {found}")
    stacked = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if stacked != slot.shape:
        raise CorruptFile(
            f"the weights of {slot.name} have shape {list(stacked)}, the configuration says {list(slot.shape)}"
        )


def write_header(file: Any, plan: Layout, metadata: dict[str, str]) -> dict[str, int]:
    """Write the safetensors header; returns where each tensor's bytes belong.

    Wider types come first, as the format asks, so every tensor starts at a multiple of its element size.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in sorted(plan, key=lambda name: -plan[name][0].itemsize):
        dtype, shape = plan[name]
        start, end = end, end + _size(dtype, shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in plan}


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
