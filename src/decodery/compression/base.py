"""What a transformation is: from a model and texts to another model, and what of the first was lost on the way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import method_of
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Linear, Weights

__all__ = ["ModelCompression", "Report", "Size", "transformed"]

Texts = Sequence[np.ndarray]
"""Calibration: texts of token ids [n] int64."""


@dataclass(frozen=True)
class Size:
    """What a part of a model takes.

    A stated cost model: what a kernel makes of it is for the clock to say.

    Attributes:
        bytes: Of its weights as a file keeps them that wastes nothing.
        macs: multiply-adds per token that are left where nothing is multiplied by what the form knows to be zero.
    """

    bytes: float
    macs: float


@dataclass(frozen=True)
class Part:
    """One changed part, such as "layers.3.qkv".

    Attributes:
        name: Of the layer.
        error: Share of its outputs' energy on the calibration text that was lost, or of its weights' where no text was
            read.
        size: Of its weights, afterwards.
    """

    name: str
    error: float
    size: Size


@dataclass(frozen=True)
class Change:
    """What one transformation made: another model, and the parts in which it differs."""

    model: Transformer
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ModelCompression(Contract):
    """Changes a model.

    Fields are settings.

    The model that is given stays as it is; what is not changed is shared with it. Tokenizer, number of layers, heads
    and positions stay, so that the copy can draft for the original: then the text is the original's, and only its cost
    changes. In the original's place the copy writes other texts.
    """

    @property
    def reads(self) -> bool:
        """Whether it must read calibration texts."""
        return False

    @property
    def mixes(self) -> bool:
        """Whether it changes mixtures of experts."""
        return False

    @abstractmethod
    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        """The changed model.

        Args:
            model: The model as it is.
            texts: What activations are measured on; none if none are given.
            progress: Called with what is being done.
        """


@dataclass(frozen=True)
class TransformationReport:
    """One transformation of a report.

    Attributes:
        error: Mean over its parts; see `Part`.
    """

    method: str
    error: float
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Report:
    """What several transformations did, one after another.

    Attributes:
        before, after: Of the whole model, its embedding included.
        bits: Per weight of the linear layers, after.
    """

    stages: tuple[TransformationReport, ...]
    before: Size
    after: Size
    bits: float

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


def transformed(
    model: LanguageModel, transforms: Sequence[ModelCompression], texts: Texts = (), progress: Progress = silent
) -> tuple[Transformer, Report]:
    """The model that `transforms` make of `model`, one after another, and what they did.

    Args:
        texts: [n] int64 token ids each, of which the later transformations see what the earlier ones left.

    Raises:
        SettingsError: If one of them must read texts and there are none.
        UnsupportedModel: For a model that this package does not run itself.
    """
    now = first = transformable(model, mixtures=all(transform.mixes for transform in transforms))
    if not transforms:
        raise SettingsError("there is nothing to do: name a transformation, such as int8")
    for transform in transforms:
        if transform.reads and not texts:
            known = method_of(transform)
            name = known.name if known else type(transform).__name__
            raise SettingsError(
                f"{name} must read a text to calibrate with: name a text file after the model in `decodery "
                "transform`, or give texts in Python"
            )
    changes = []
    for transform in transforms:
        changes.append((repr(transform), transform.change(now, texts, progress)))
        now = changes[-1][1].model
    return now, reported(first, changes)


def transformable(model: LanguageModel, *, mixtures: bool = False) -> Transformer:
    """The model, where it is one that can be changed.

    Args:
        mixtures: Whether mixtures of experts can.

    Raises:
        UnsupportedModel: For others.
    """
    if not isinstance(model, Transformer):
        raise UnsupportedModel(
            "only decoders that this package runs itself can be transformed: this has an encoder, or is run by others"
        )
    if model.config.kept_tokens:
        raise UnsupportedModel("this model has outputs for some of its tokens only: transform the one it was made from")
    if model.config.experts and not mixtures:
        raise UnsupportedModel("of transformations, mc-moe alone changes mixtures of experts: use it, or dtype=int8")
    if not model.config.usual:
        raise UnsupportedModel(f"layers of {model.config.family} cannot be transformed yet: load them with dtype=int8")
    return model


def reported(model: Transformer, changes: Sequence[tuple[str, Change]]) -> Report:
    """What changes made of a model, one after another, each with what it is called."""
    stages = []
    for method, change in changes:
        error = sum(part.error for part in change.parts) / max(1, len(change.parts))
        stages.append(TransformationReport(method, error, change.parts))
    last = changes[-1][1]
    after = sizes(last.model) | {part.name: part.size for part in last.parts}
    linears = [name for name in after if name != "embedding" and not name.endswith(("norm", "shortcut"))]
    weights = sum(each.shape[0] * each.shape[1] for each in map(_linears(last.model).__getitem__, linears))
    bits = 8 * sum(after[name].bytes for name in linears) / weights
    return Report(tuple(stages), _total(sizes(model)), _total(after), bits)


def sizes(model: Transformer) -> dict[str, Size]:
    """What every part of a model takes as it is."""
    weights = model.weights
    found = {name: _stored(linear) for name, linear in _linears(model).items()}
    if model.config.experts:
        share = model.config.experts_per_token / model.config.experts
        for name in (name for name in found if name.endswith(("gate_up", "down"))):
            found[name] = replace(found[name], macs=share * found[name].macs)
    for name, tensor in _others(weights).items():
        macs = tensor.numel() if name.endswith("shortcut") else 0
        found[name] = Size(tensor.numel() * tensor.itemsize, macs)
    if getattr(weights.head, "weight", None) is weights.embedding:
        # One table, which is read as the head.
        found["embedding"] = Size(0, 0)
    return found


def _linears(model: Transformer) -> dict[str, Any]:
    found = {
        f"layers.{index}.{name}": getattr(layer, name)
        for index, layer in enumerate(model.weights.layers)
        for name in LINEARS
    }
    return found | {"head": model.weights.head}


def _others(weights: Weights) -> Mapping[str, Any]:
    parts = {"embedding": weights.embedding, "norm": weights.norm}
    for index, layer in enumerate(weights.layers):
        held = {name: part for name, part in vars(layer).items() if name.endswith(("norm", "shortcut"))}
        parts |= {f"layers.{index}.{name}": part for name, part in held.items() if part is not None}
    return parts


def _stored(linear: Linear) -> Size:
    tensors = linear.tensors()  # type: ignore[attr-defined]
    outputs, inputs = linear.shape  # type: ignore[attr-defined]
    return Size(sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()), outputs * inputs)


def _total(parts: Mapping[str, Size]) -> Size:
    return Size(sum(part.bytes for part in parts.values()), sum(part.macs for part in parts.values()))


LINEARS = ("qkv", "output", "gate_up", "down")
"""The linear layers of a layer, in the order of use."""


def rebuilt(model: Transformer, **parts: Any) -> Transformer:
    """The same model with other weights; the configuration says whether embedding and head are one table."""
    weights = replace(model.weights, **parts)
    tied = getattr(weights.head, "weight", None) is weights.embedding
    return Transformer(replace(model.config, tie_embeddings=tied), weights)
