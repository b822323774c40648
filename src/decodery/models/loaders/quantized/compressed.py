"""compressed-tensors folders (llm-compressor, vLLM): W4A16 and W8A16, W8A8, FP8, NVFP4, MXFP4 and MXFP8.

Tensors tell the formats apart, layer by layer; each layer must be kept as one of the configuration's groups says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from ...native.packed import BLOCK
from ..fields import Either, Fields, Flag, Kind, Listed, Named, Record, Text, Whole
from .floats import FP8, Floats, nibbles, powers
from .fp8 import INPUTS, fp8_weight
from .gptq import FLOATS
from .integers import Integers, unpacked
from .modelopt import GROUP
from .weight import Format, Tensors, Weight, read_fields

_LAYOUTS = (
    *("dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
_ARGS: dict[str, Kind] = {
    "num_bits": Whole(1, 16),
    "type": Text(16),
    "symmetric": Flag(),
    "strategy": Text(32),
    "group_size": Whole(-1, 1 << 20),
    "block_structure": Either(Listed(Whole(1, 1 << 16), 2), Text(32)),
}
_ARGS_UNREAD = ("dynamic", "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype", "is_mx")
_GROUP: dict[str, Kind] = {"weights": Record(_ARGS), "format": Text(64)}
_GROUP_UNREAD = ("targets", "input_activations", "output_activations")
_CONFIG: dict[str, Kind] = {
    "quant_method": Text(64),
    "format": Text(64),
    "quantization_status": Text(32),
    # A list names a scheme that everyone knows, and its targets.
    "config_groups": Named(Either(Record(_GROUP), Listed(Text(), 1 << 12)), 1 << 10),
}
_OFF: dict[str, tuple[Any, ...]] = {
    "transform_config": (None, {}),
    "moe_sparsity_config": (None, {}),
}
_UNREAD = (
    *("ignore", "kv_cache_scheme", "global_compression_ratio", "version", "run_compressed", "dequantize"),
    *("use_optimized_inference", "sparsity_config"),
)


@dataclass(frozen=True)
class Args:
    """How the weights of a group of layers are kept, each None where it is not said."""

    bits: int
    type: str
    symmetric: bool
    strategy: str | None
    group: int | None
    block: tuple[int, int] | None

    @classmethod
    def read(cls, raw: Any, origin: str) -> Args:
        """From the `weights` of a group.

        Raises:
            UnsupportedModel: For what is not known.
        """
        fields = read_fields(raw, origin, _ARGS, _ARGS_UNREAD, {})
        block = fields.get("block_structure")
        sizes = [str(size) for size in (block.split("x") if isinstance(block, str) else block or [])]
        if block is not None and not (len(sizes) == 2 and all(size.isdecimal() and int(size) for size in sizes)):
            raise CorruptFile(f"{origin}: block_structure should be two numbers")
        group, strategy = fields.get("group_size"), fields.get("strategy")
        if strategy is None:
            strategy = None if group is None else "channel" if group == -1 else "group"
        return cls(
            fields.get("num_bits", 8), fields.get("type", "int"), fields.get("symmetric", True), strategy,
            group if group and group > 0 else None, (int(sizes[0]), int(sizes[1])) if sizes else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Compressed(Format):
    """How a folder keeps its weights.

    Attributes:
        groups: The configuration's, in its order; None stands for one that is named only.
    """

    groups: tuple[Args | None, ...]

    methods = ("compressed-tensors",)
    beside = (
        *INPUTS,
        ".input_global_scale",
        ".input_zero_point",
        ".output_zero_point",
        ".k_zero_point",
        ".v_zero_point",
    )

    @classmethod
    def read(cls, raw: Any, origin: str) -> Compressed:
        """See `Format.read`."""
        fields = read_fields(raw, origin, _CONFIG, _UNREAD, _OFF)
        _check_sparsity(fields)
        if (status := fields.get("quantization_status", "compressed")) != "compressed":
            raise UnsupportedModel(f"{origin}: weights whose status is {status!r} are not read: save them compressed")
        found: list[Args | None] = []
        layouts = [fields.get("format", "dense")]
        for name, group in fields.get("config_groups", {}).items():
            at = f"{origin}: {name[:60]}"
            if isinstance(group, list):
                found.append(None)
                continue
            own = read_fields(group, at, _GROUP, _GROUP_UNREAD, {})
            layouts.append(own.get("format", "dense"))
            if own.get("weights") is not None:
                found.append(Args.read(own.get("weights"), f"{at}: weights"))
        if unknown := next((each for each in layouts if each not in _LAYOUTS), None):
            raise UnsupportedModel(f"{origin}: the format {unknown!r} is not read: {', '.join(_LAYOUTS)} are")
        return cls(tuple(found))

    def weight(self, tensors: Tensors) -> Weight | None:
        """See `Format.weight`."""
        kind = tensors.kind("weight_packed") if "weight_packed" in tensors else None
        if kind == "I32":
            return self._packed(tensors)
        if kind is not None:
            return self._fp4(tensors)
        if "weight" not in tensors:
            return None
        if tensors.kind("weight") == "I8":
            return self._plain(tensors)
        if tensors.kind("weight") not in FP8:
            return None
        blocks = sorted({each.block for each in self.groups if each is not None and each.block is not None})
        self._check(tensors, type="float", bits=8)
        found = fp8_weight(tensors, ("weight_scale",), blocks)
        if found is not None and "weight_zero_point" in tensors:
            if not _is_unset(tensors):
                raise CorruptFile(f"{tensors.stem}weight_zero_point is not zero, where FP8 has no zeros")
            found.names += ("weight_zero_point",)
        return found

    def _packed(self, tensors: Tensors) -> Integers:
        """Integers of 1 to 8 bits in 32-bit words, those of one output in a string."""
        outputs, words = tensors.need("weight_packed", ("I32",), None, None)
        tensors.need("weight_shape", ("I64", "I32"), 2)
        rows_, inputs = (int(size) for size in tensors("weight_shape"))
        bits = next((n for n in range(8, 0, -1) if words == -(-inputs * n // 32) and inputs > 0), 0)
        if rows_ != outputs or not bits:
            raise CorruptFile(
                f"{tensors.stem}weight_packed has no {rows_} rows of {inputs} numbers: the file is damaged"
            )
        wanted = {each.bits for each in self.groups if each is not None and each.type == "int"}
        # Of few inputs, several widths take the same words.
        bits = next((n for n in sorted(wanted) if words == -(-inputs * n // 32)), bits)
        groups, group, order = _groups(tensors, outputs, inputs)
        named, zeros = "weight_zero_point" in tensors, 1 << (bits - 1)
        zero = named and not _is_unset(tensors)
        if zero:
            tensors.need("weight_zero_point", ("I32",), -(-outputs * bits // 32), groups)
        self._check(tensors, type="int", bits=bits, symmetric=not zero, **_shared(groups, group))

        def zeros_of(rows: torch.Tensor) -> torch.Tensor:
            if not zero:
                return torch.full((len(rows), groups), zeros, dtype=torch.int32, device="cpu")
            return unpacked(tensors("weight_zero_point").T, bits, outputs)[:, rows].T

        names = ("weight_packed", "weight_scale", "weight_shape", *(["weight_zero_point"] if named else []))
        names += ("weight_g_idx",) if "weight_g_idx" in tensors else ()
        return Integers(
            (outputs, inputs), names, bits, group,
            numbers=lambda rows: unpacked(tensors("weight_packed")[rows], bits, inputs),
            steps=_steps(tensors, outputs, groups), zeros=zeros_of, order=order,
        )  # fmt: skip

    def _plain(self, tensors: Tensors) -> Integers:
        """Integers of 8 bits, or of fewer in as many."""
        outputs, inputs = tensors.need("weight", ("I8",), None, None)
        groups, group, order = _groups(tensors, outputs, inputs)
        named = "weight_zero_point" in tensors
        zero = named and not _is_unset(tensors)
        self._check(tensors, type="int", symmetric=not zero, **_shared(groups, group))

        def zeros_of(rows: torch.Tensor) -> torch.Tensor:
            if not zero:
                return torch.full((len(rows), groups), 128, dtype=torch.int32, device="cpu")
            found = tensors("weight_zero_point").reshape(-1, groups).int() + 128
            return found.expand(outputs, groups)[rows]

        if zero:
            tensors.need("weight_zero_point", ("I8",), *tensors.shape("weight_scale"))
        names = ("weight", "weight_scale", *(["weight_zero_point"] if named else []))
        names += ("weight_g_idx",) if "weight_g_idx" in tensors else ()
        return Integers(
            (outputs, inputs), names, 8, group,
            numbers=lambda rows: (tensors("weight")[rows].int() + 128).to(torch.uint8),
            steps=_steps(tensors, outputs, groups), zeros=zeros_of, order=order,
        )  # fmt: skip

    def _fp4(self, tensors: Tensors) -> Floats:
        """E2M1 numbers, two a byte: NVFP4, or MXFP4 where scales are powers of two."""
        outputs, half = tensors.need("weight_packed", ("U8",), None, None)
        shape = outputs, 2 * half
        if "weight_global_scale" not in tensors:
            tensors.need("weight_scale", ("U8", "F8_E8M0"), outputs, -(-shape[1] // BLOCK))
            self._check(tensors, type="float", bits=4, group=BLOCK)
            return Floats(
                shape, ("weight_packed", "weight_scale"), BLOCK, lambda rows: nibbles(tensors("weight_packed")[rows]),
                lambda rows: powers(tensors("weight_scale")[rows]), codes=True,
            )  # fmt: skip
        tensors.need("weight_scale", FP8, outputs, -(-shape[1] // GROUP))
        tensors.need("weight_global_scale", ("F32",), 1)
        if not (divisor := float(tensors("weight_global_scale"))) > 0:
            raise CorruptFile(f"{tensors.stem}weight_global_scale is {divisor}, which is no scale")
        self._check(tensors, type="float", bits=4, group=GROUP)
        return Floats(
            shape, ("weight_packed", "weight_scale", "weight_global_scale"), GROUP,
            lambda rows: nibbles(tensors("weight_packed")[rows]),
            lambda rows: tensors("weight_scale")[rows].float() / tensors("weight_global_scale"), codes=True,
            steps=lambda rows: tensors("weight_scale")[rows].float(), factor=1.0 / divisor,
        )  # fmt: skip

    def _check(self, tensors: Tensors, **found: Any) -> None:
        """Refuse tensors that are kept as no group says."""
        if not any(
            each is None or all(getattr(each, name) in (None, value) for name, value in found.items())
            for each in self.groups
        ):
            said = ", ".join(f"{name} {value}" for name, value in found.items())
            raise CorruptFile(f"{tensors.stem}weight is kept with {said}, as none of the config_groups says")


def _is_unset(tensors: Tensors) -> bool:
    """Whether zeros are written and are none, as earlier versions have them for symmetric weights."""
    return tensors.kind("weight_zero_point") != "I32" and not tensors("weight_zero_point").float().any()


def _groups(tensors: Tensors, outputs: int, inputs: int) -> tuple[int, int, torch.Tensor | None]:
    """How many groups of inputs there are, how many inputs share a step, and the group of each input."""
    shape = tensors.shape("weight_scale") if "weight_scale" in tensors else ()
    groups = shape[1] if len(shape) == 2 else 1
    if "weight_scale" not in tensors or tensors.kind("weight_scale") not in FLOATS or not groups or inputs % groups:
        raise CorruptFile(f"{tensors.stem}weight has no steps for groups of its {inputs} inputs: the file is damaged")
    if shape and shape[0] not in (1, outputs):
        raise CorruptFile(f"{tensors.stem}weight_scale has {shape[0]} rows where there are {outputs} outputs")
    if "weight_g_idx" not in tensors:
        return groups, inputs // groups, None
    tensors.need("weight_g_idx", ("I32", "I64"), inputs)
    order = tensors("weight_g_idx").long()
    if int(order.max()) >= groups:
        raise CorruptFile(f"{tensors.stem}weight_g_idx names groups beyond the {groups} that there are")
    # Before it is set, it is -1.
    return groups, inputs // groups, None if int(order.min()) < 0 else order


def _shared(groups: int, group: int) -> dict[str, int]:
    """What a configuration must say of groups; of one it need not."""
    return {"group": group} if groups > 1 else {}


def _steps(tensors: Tensors, outputs: int, groups: int) -> Any:
    """Reads steps [n, groups] of some outputs; one number is that of all."""
    return lambda rows: tensors("weight_scale").reshape(-1, groups).expand(outputs, groups)[rows]


def _check_sparsity(fields: Fields) -> None:
    """Refuse weights of which zeros are left out."""
    raw: Mapping[str, Any] = fields.raw.get("sparsity_config") or {}
    if not isinstance(raw, dict) or raw.get("format", "dense") != "dense":
        raise fields.unsupported("sparsity_config")
