"""What formats of quantized weights have in common: the tensors of a layer, and the weight that they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form

from ...native.floats import Float4Linear, Float8Linear, NF4Linear
from ...native.int8 import Int8Linear
from ...native.super_blocks import BlockKind
from ..fields import Fields, Kind

Native: TypeAlias = BlockKind | Int8Linear | Float4Linear | Float8Linear | NF4Linear
"""A layer of fewer than 16 bits."""


class Shelf(Protocol):
    """Where tensors come from, by their whole names."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        ...

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type of a tensor, as safetensors names it, and its shape."""
        ...

    def any_tensor(self, name: str) -> torch.Tensor:
        """A tensor of any type."""
        ...


class Tensors:
    """The tensors of one layer, by the last parts of their names.

    Args:
        stem: What their names begin with, such as "model.layers.0.mlp.down_proj.".
    """

    def __init__(self, shelf: Shelf, stem: str) -> None:
        self.stem = stem
        self._shelf = shelf

    def __contains__(self, last: str) -> bool:
        return self.stem + last in self._shelf.names

    def __call__(self, last: str) -> torch.Tensor:
        return self._shelf.any_tensor(self.stem + last)

    def kind(self, last: str) -> str:
        """The type of a tensor, as safetensors names it, such as "F8_E4M3"."""
        return self._shelf.info(self.stem + last)[0]

    def shape(self, last: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._shelf.info(self.stem + last)[1]

    def need(self, last: str, kinds: Collection[str], *shape: int | None) -> tuple[int, ...]:
        """The shape of a tensor that must have one of these types.

        Args:
            last: The last part of its name.
            kinds: Types, as safetensors names them.
            *shape: What its shape must be; None stands for any size.

        Raises:
            CorruptFile: If there is no such tensor.
        """
        if last not in self:
            raise CorruptFile(f"there is no tensor {self.stem}{last}: the weights are incomplete")
        kind, found = self.kind(last), self.shape(last)
        fits = len(found) == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(found, shape, strict=True)
        )
        if kind not in kinds or not fits:
            wanted = f"{' or '.join(kinds)} [{', '.join('any' if size is None else str(size) for size in shape)}]"
            raise CorruptFile(
                f"the tensor {self.stem}{last} is {kind} {list(found)} where {wanted} is needed: the file is damaged"
            )
        return found


class Weight(ABC):
    """The weight of a linear layer, as a file keeps it.

    Attributes:
        shape: (out, in).
        names: The last parts of the names of its tensors.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of native layers that hold the weights without rounding, the one of fewest bytes first."""
        return ()

    @property
    def columns(self) -> torch.Tensor | None:
        """[in] int64 which input each column of `layer` belongs to, None for the inputs in turn."""
        return None

    @abstractmethod
    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """Some outputs [n, in] float32, as the format's reference computes them in float32.

        Args:
            rows: [n] int64, which outputs.
        """

    def layer(self, rows: torch.Tensor, form: Form) -> Native:
        """Some outputs as a layer of one of `forms`.

        Args:
            rows: [n] int64, which outputs.
            form: One of `forms`.
        """
        raise NotImplementedError(form)


class Format(ABC):
    """A format of quantized weights, as a `quantization_config` describes it.

    Tensors say which layers are quantized and how: lists of modules in the configuration, and patterns of their names,
    say nothing more, and are left unread.

    Attributes:
        methods: What `quant_method` calls it.
        beside: How the names of tensors end that weights do not depend on.
    """

    methods: ClassVar[tuple[str, ...]]
    beside: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def read(cls, raw: Any, origin: str) -> Format:
        """From a `quantization_config`.

        Args:
            raw: The configuration.
            origin: What errors call it.

        Raises:
            UnsupportedModel: For what is not read.
        """

    @abstractmethod
    def weight(self, tensors: Tensors) -> Weight | None:
        """The weight that tensors of a layer stand for.

        Returns:
            None if the layer is not quantized.

        Raises:
            CorruptFile: If the tensors do not fit together.
        """


def read_fields(
    raw: Any, origin: str, kinds: Mapping[str, Kind], unread: Collection[str], off: Mapping[str, tuple[Any, ...]]
) -> Fields:
    """The fields of a configuration, none of which is left over.

    Args:
        raw: The configuration.
        origin: What errors call it.
        kinds: The kinds of the fields that are read.
        unread: Names of fields that weights do not depend on.
        off: Values of fields that switch nothing on; others are refused.

    Raises:
        UnsupportedModel: For an unknown field or value.
    """
    fields = Fields(raw, origin, kinds)
    if unknown := sorted(fields.raw.keys() - kinds.keys() - {*unread} - off.keys()):
        raise UnsupportedModel(
            f"{origin}: the field {unknown[0]} is not known here, so the weights might be read wrongly: "
            "remove it if they do not depend on it"
        )
    for name, plain in off.items():
        if name in fields.raw and fields.raw[name] not in plain:
            raise fields.unsupported(name)
    return fields
