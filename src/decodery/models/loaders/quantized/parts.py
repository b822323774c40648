"""The quantized weights of a folder, by the names that its weights would have in floating point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from decodery.core.native.kernels import Form

from ...native.packed import BITS
from .weight import Format, Shelf, Tensors, Weight

FLOATS = {"F16": Form.FLOAT16, "BF16": Form.BFLOAT16}
"""Forms of what is not quantized, by the types of safetensors."""


class QuantizedParts:
    """What a format says of the tensors of a folder.

    Args:
        form: None for a folder that is not quantized.
        shelf: The folder's tensors.
        default: The type that the format's own readers make weights, as safetensors names it.
    """

    def __init__(self, form: Format | None, shelf: Shelf, default: str) -> None:
        self._format, self._shelf, self._default = form, shelf, default
        self._found: dict[str, tuple[str, Weight] | None] = {}

    def __bool__(self) -> bool:
        return self._format is not None

    def weight(self, names: Sequence[str]) -> Weight | None:
        """A weight, by the names that it may have; None where it is not quantized."""
        found = self._read(names)
        return None if found is None else found[1]

    def tensors(self, names: Sequence[str]) -> set[str]:
        """The names of the tensors that a weight is kept as."""
        found = self._read(names)
        return set() if found is None else {found[0] + last for last in found[1].names}

    def forms(self, names: Sequence[str], name: str) -> tuple[Form, ...]:
        """The forms of native layers that hold a weight as it is.

        What has no form of integers is made what the format's own readers make it, and so may be what has columns in
        another order.

        Args:
            names: What the weight may be called.
            name: What it is called where it is not quantized.
        """
        if self._format is None:
            return ()
        weight = self.weight(names)
        kind = self._default if weight is not None else self._shelf.info(name)[0]
        own = weight.forms if weight is not None else ()
        ordered = weight is None or weight.columns is None
        return own if own and ordered else own + ((FLOATS[kind],) if kind in FLOATS else ())

    def columns(self, names: Sequence[str]) -> torch.Tensor | None:
        """[in] which input each column of a weight's native layers belongs to, None for the inputs in turn.

        Args:
            names: What the weight may be called.
        """
        weight = self.weight(names)
        return None if weight is None else weight.columns

    def is_beside(self, name: str) -> bool:
        """Whether weights do not depend on a tensor."""
        return self._format is not None and name.endswith(self._format.beside)

    def _read(self, names: Sequence[str]) -> tuple[str, Weight] | None:
        if self._format is None:
            return None
        if names[0] not in self._found:
            stems = [name.removesuffix("weight") for name in names]
            found = ((stem, self._format.weight(Tensors(self._shelf, stem))) for stem in stems)
            self._found[names[0]] = next(((stem, weight) for stem, weight in found if weight is not None), None)
        return self._found[names[0]]


def most_bits(layers: Iterable[tuple[int, Sequence[tuple[Form, ...]]]]) -> str:
    """What most quantized weights stay in as they are: "int4", "quantized" for more bits, or "float".

    Args:
        layers: Of each layer how many weights it has, and the forms of its parts.
    """
    sizes: Counter[str] = Counter()
    for size, parts in layers:
        shared = set.intersection(*map(set, parts)) - {*FLOATS.values()}
        bits = min((BITS.get(form, 8) for form in shared), default=0)
        sizes["float" if not bits else "int4" if bits == 4 else "quantized"] += size
    if sizes["float"] * 2 >= sizes.total():
        return "float"
    return "int4" if sizes["int4"] * 2 > sizes.total() else "quantized"
