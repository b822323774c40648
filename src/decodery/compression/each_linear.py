"""What transformations share that change every linear layer by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from decodery.models.loaders.store import Progress
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, floating

from .base import LINEARS, Change, ModelCompression, Part, Size, Texts, rebuilt
from .stream import Gram, Stream, cast, floats


class Made(NamedTuple):
    """A linear layer, and what a file needs for it."""

    linear: Any
    size: Size


Maker = Callable[[Dense, "torch.Tensor | None", int], Made]
"""What `EachLinear.linear` is."""


@dataclass(frozen=True)
class EachLinear(ModelCompression):
    """Changes the linear layers one after another.

    Layers read what the changed ones before them give.

    The head, which chooses the tokens, becomes int8 where the others are integers, and else stays as it is; the
    embedding, whose rows are only looked up, is bfloat16 beside integers. Layers in floating point are of the type that
    the model has, float32 where it had integers.
    """

    @abstractmethod
    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        """What takes the place of a linear layer.

        Args:
            gram: [in, in] float64, sum of x^T x over what it is given.
            itemsize: Bytes of a floating point number in the copy.
        """

    def makers(self, model: Transformer, texts: Texts, progress: Progress) -> Mapping[str, Maker]:
        """What is to be done in the place of `linear` with single layers, by names such as "layers.3.qkv"."""
        return {}

    @property
    def whole_numbers(self) -> bool:
        """Whether it makes int8 and int4 layers, which run together, and not such in floating point."""
        return True

    @torch.no_grad()
    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        stream = Stream(model, list(texts)) if len(texts) else None
        kept = model.weights.dtype
        dtype = torch.promote_types(kept, torch.float32)
        parts: list[Part] = []
        layers = []
        makers = self.makers(model, texts, progress)
        for index, layer in enumerate(model.weights.layers):
            whole = floats(layer, dtype)
            grams: dict[str, torch.Tensor | None] = dict.fromkeys(LINEARS)
            if stream is not None:
                noted = {name: Gram(getattr(whole, name)) for name in LINEARS}
                stream.through(index, with_linears(whole, noted))
                grams |= {name: gram.total for name, gram in noted.items()}
            made = {}
            for name in LINEARS:
                make = makers.get(f"layers.{index}.{name}", self.linear)
                made[name] = make(getattr(whole, name), grams[name], kept.itemsize)
            seen = {name: Dense(dense(each.linear).to(dtype), each.linear.bias) for name, each in made.items()}
            for name, each in made.items():
                error = lost(getattr(whole, name).weight, seen[name].weight, grams[name])
                parts.append(Part(f"layers.{index}.{name}", error, each.size))
            layers.append(with_linears(whole, {name: each.linear for name, each in made.items()}))
            if stream is not None:
                stream.rows = stream.through(index, with_linears(whole, seen))
            progress("transforming", index + 1, len(model.weights.layers))
        return joined(model, layers, parts, whole_numbers=self.whole_numbers)


def joined(model: Transformer, layers: list[Layer], parts: list[Part], *, whole_numbers: bool) -> Change:
    """A model of other layers, its head and embedding in the form that goes with them, see `EachLinear`."""
    weights = model.weights
    if not whole_numbers:
        # All of a model is in one floating point type.
        dtype = weights.dtype
        layers = [floats(layer, dtype) for layer in layers]
        head = cast(floating(weights.head), dtype)
        tied = getattr(weights.head, "weight", None) is weights.embedding
        embedding = head.weight if tied else weights.embedding.to(dtype)
        made = rebuilt(model, embedding=embedding, layers=layers, head=head)
        return Change(made, tuple(parts))
    head = floating(weights.head)
    whole = weights.head if isinstance(weights.head, Int8Linear) else Int8Linear.quantize(head.weight, head.bias)
    if whole is not weights.head:
        parts = [*parts, Part("head", lost(head.weight, whole.dense(), None), size_of(whole))]
    layers = [float32(layer) for layer in layers]
    embedding = weights.embedding.to(torch.bfloat16)
    made = rebuilt(model, embedding=embedding, layers=layers, norm=weights.norm.float(), head=whole)
    return Change(made, tuple(parts))


def dense(linear: Any) -> torch.Tensor:
    """[out, in] the weights that a linear layer stands for."""
    return linear.weight if isinstance(linear, Dense) else linear.dense()


def lost(before: torch.Tensor, after: torch.Tensor, gram: torch.Tensor | None) -> float:
    """Share of the outputs' energy that a change of weights [out, in] costs.

    Of the weights' where gram is None.
    """
    before, difference = before.double(), after.double() - before.double()
    if gram is None:
        return float(difference.square().sum() / before.square().sum())
    return float(((difference @ gram) * difference).sum() / ((before @ gram) * before).sum())


def size_of(linear: Any) -> Size:
    """What a linear layer takes as it is kept."""
    outputs, inputs = linear.shape
    return Size(sum(tensor.numel() * tensor.itemsize for tensor in linear.tensors().values()), outputs * inputs)


def float32(layer: Layer) -> Layer:
    """Layers of integers have all else in float32."""
    tensors: dict[str, Any] = {
        name: part.float() for name, part in vars(layer).items() if isinstance(part, torch.Tensor)
    }
    return replace(layer, **tensors)


def with_linears(layer: Layer, linears: Mapping[str, Any]) -> Layer:
    """The same layer with other linear layers, by name."""
    return replace(layer, **linears)
