"""What a model's weights are kept in, and how many bytes of them a pass reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from decodery.core.native.kernels import Form

from .loaders.in_place import InPlace
from .native.packed import BITS, packed_size
from .protocol import LanguageModel
from .reduced_vocabulary import ReducedVocabulary
from .torch.packed_linear import PackedLinear
from .torch.transformer import Transformer
from .torch.weights import Layer


def precision(model: LanguageModel) -> str:
    """What the linear layers' weights are kept in: "int4", "int8", "bfloat16", "float32", ..."""
    if not isinstance(model, Transformer):
        return str(model.dtype).removeprefix("torch.")
    linears = [
        linear for layer in model.weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    if bits := [each.bits for each in (*linears, model.weights.head) if isinstance(each, PackedLinear)]:
        return "int4" if 4 in bits else "int8"
    forms = [linear.form for linear in (*linears, model.weights.head)]  # type: ignore[attr-defined]
    if any(BITS.get(form) == 4 or form == Form.ROWS2 for form in forms):
        return "int4"
    if Form.ROWS8 in forms:
        return "int8"
    return str(next(_tensors(linears)).dtype).removeprefix("torch.")


def weight_bytes(model: LanguageModel) -> int:
    """Bytes of weights every pass reads: all layers, norms and the head.

    Of the embedding only a few rows are read. Zero for a model whose weights cannot be seen.
    """
    if isinstance(model, ReducedVocabulary):
        return weight_bytes(model.model) - round(_head_bytes(model.model) * (1 - model.outputs / model.vocab_size))
    if not isinstance(model, Transformer):
        return 0
    weights, sharing = model.weights, model.config.sharing
    # A block that layers share is read anew by each of them.
    shared = [weights.shared[turn % len(weights.shared)] for turn in range(len(sharing))]
    again = sum(tensor.nbytes for tensor in _tensors([shared, weights.uses]))
    again += sum(packed_size(linear) for linear in _in_place([weights.layers, weights.head]))
    seen = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors([weights.layers, weights.norm, weights.head])}
    return sum(seen.values()) + again


def _head_bytes(model: LanguageModel) -> int:
    """Of the vocabulary projection."""
    if not isinstance(model, Transformer):
        return 0
    head: Any = model.weights.head
    if isinstance(head, InPlace):
        return sum(packed_size(each) for each in _in_place(head))
    return sum(tensor.nbytes for tensor in _tensors(head))


def _in_place(value: Any) -> Iterator[Any]:
    """All layers that are read in place inside lists and dataclasses."""
    if isinstance(value, InPlace):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _in_place(item)
    elif isinstance(value, Layer):
        yield from _in_place(list(vars(value).values()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside lists and dataclasses, but for layers that are read in place."""
    if isinstance(value, InPlace):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
