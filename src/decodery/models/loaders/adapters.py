"""Adapters: what fine-tuning adds to some of a model's matrices, and the model with that added.

An S2FT adapter holds a few columns of a matrix (S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by
Structured Sparsity, 2024), a LoRA adapter two thin matrices (LoRA: Low-Rank Adaptation of Large Language Models, 2021).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch

from decodery.core.errors import SettingsError, UnsupportedModel

from ..config import ModelConfig
from ..families.arranged import ARRANGED
from ..native.int8 import Int8Linear
from ..protocol import Reader
from ..torch.transformer import Transformer
from ..torch.weights import Dense, Linear, floating
from ..trained.artifact import Artifact, TrainedPart, expect, remembered
from . import peft
from .fused_slots import LINEARS

_KEPT = 4
"""Models with something added that are kept beside each model, those that were asked for last."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of a matrix.

    Attributes:
        columns: [k] int64, ascending.
        delta: [out, k] what is added to them.
    """

    columns: torch.Tensor
    delta: torch.Tensor

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix [out, in] with this added, as a new one."""
        return weight.index_add(1, self.columns.to(weight.device), self.delta.to(weight))

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether it can be added to a matrix [outputs, inputs]."""
        count = len(self.columns)
        inside = count > 0 and int(self.columns.min()) >= 0 and int(self.columns.max()) < inputs
        return inside and tuple(self.delta.shape) == (outputs, count)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of it."""
        return {"columns": self.columns, "delta": self.delta}


@dataclass(frozen=True, eq=False)
class Thin:
    """A matrix of low rank.

    Attributes:
        first: [out, rank].
        second: [rank, in]; their product is what is added.
    """

    first: torch.Tensor
    second: torch.Tensor

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Columns.added`."""
        return weight + self.first.to(weight) @ self.second.to(weight)

    def fits(self, outputs: int, inputs: int) -> bool:
        """See `Columns.fits`."""
        rank = self.first.shape[-1]
        return tuple(self.first.shape) == (outputs, rank) and tuple(self.second.shape) == (rank, inputs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of it."""
        return {"first": self.first, "second": self.second}


@dataclass(frozen=True, eq=False)
class Exchanged(Thin):
    """A low-rank matrix that replaces part of the matrix it is added to (PiSSA and OLoRA of PEFT).

    PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models (2024); OLoRA: Orthonormal
    Low-Rank Adaptation of Large Language Models (2024).

    Attributes:
        how: "pissa" for the largest singular values, "olora" for the first columns of a QR decomposition.
        scale: What the product is multiplied by, which `first` has in it.
    """

    how: str = "pissa"
    scale: float = 1.0

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Columns.added`."""
        return super().added(weight) - peft.replaced(weight, self.how, self.first.shape[-1], self.scale)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of it."""
        return super().tensors() | {self.how: torch.full((1, 1), self.scale, dtype=torch.float32, device="cpu")}


@dataclass(frozen=True, eq=False)
class Adapter(TrainedPart):
    """What is added to a model's matrices.

    Matrices are named as a model keeps them ("qkv", "output", "gate_up", "down") or by what they are made of ("q", "k",
    "v", "gate", "up"), as checkpoints of other stacks do.

    Attributes:
        parts: By names such as "layers.3.down".
        facts: How it was made.
        model: `fingerprint` of the model it was trained for, "" where it goes with every one that it fits.
    """

    KIND = "adapter"
    FILE = "adapter.safetensors"
    MADE = (
        "train one with `decodery train s2ft -m MODEL FILES --out DIR` or "
        "`decodery train lora -m MODEL FILES --out DIR`"
    )

    parts: Mapping[str, Columns | Thin]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def artifact(self) -> Artifact:
        tensors = {f"{name}.{key}": part for name, each in self.parts.items() for key, part in each.tensors().items()}
        return Artifact(self.KIND, tensors, self.facts, self.model)

    @classmethod
    def load(cls, given: Self | str | Path | None, setting: str = "") -> Self:
        """As `TrainedPart.load`; it also reads a folder of PEFT's LoRA.

        Raises:
            UnsupportedModel: For what PEFT adds otherwise.
        """
        if isinstance(given, str | Path):
            at = Path(given).expanduser()
            if (at / peft.CONFIG).is_file() and not (at / cls.FILE).is_file():
                return cast(Self, _load_lora(at))
        return super().load(given, setting)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Adapter:
        named: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in found.tensors.items():
            stem, _, key = name.rpartition(".")
            named.setdefault(stem, {})[key] = tensor
        parts: dict[str, Columns | Thin] = {}
        for name, tensors in named.items():
            floats = all(
                each.is_floating_point() and each.ndim == 2 for key, each in tensors.items() if key != "columns"
            )
            if floats and tensors.keys() == {"first", "second"}:
                parts[name] = Thin(**tensors)
            elif floats and (how := next((each for each in peft.EXCHANGED if each in tensors), None)):
                if tensors.keys() == {"first", "second", how} and tensors[how].numel() == 1:
                    parts[name] = Exchanged(tensors["first"], tensors["second"], how, float(tensors[how]))
            elif floats and tensors.keys() == {"columns", "delta"} and tensors["columns"].dtype == torch.int64:
                parts[name] = Columns(**tensors)
        expect(bool(parts) and parts.keys() == named.keys())
        return cls(parts, found.facts, found.model)


@remembered
def _load_lora(folder: Path) -> Adapter:
    read = peft.read_lora(folder)
    if read.exchanged:
        return Adapter({name: Exchanged(*pair, read.exchanged, read.scale) for name, pair in read.pairs.items()})
    return Adapter({name: Thin(*pair) for name, pair in read.pairs.items()})


_made: WeakKeyDictionary[Transformer, OrderedDict[Adapter, Transformer]] = WeakKeyDictionary()
_making = Lock()


def tuned(model: Reader, adapter: Adapter) -> Transformer:
    """The model with an adapter's matrices added, which shares all others with it.

    Made once for the last few of them. Matrices of integers become int8, rounded anew with what is added to them; the
    model itself stays as it is.

    Raises:
        UnsupportedModel: For models that others run.
        SettingsError: For an adapter of another one.
    """
    if not isinstance(model, Transformer) or model.config.experts:
        raise UnsupportedModel(
            "adapters go with models that this package runs itself, whose layers have one MLP each: load another model"
        )
    adapter.refuse_other(model)
    with _making:
        known = _made.setdefault(model, OrderedDict())
        if adapter not in known:
            known[adapter] = _with(model, adapter)
            if len(known) > _KEPT:
                known.popitem(last=False)
        known.move_to_end(adapter)
        return known[adapter]


def _with(model: Transformer, adapter: Adapter) -> Transformer:
    spans = _spans(model.config)
    known = {f"layers.{index}.{name}" for index in range(model.config.num_layers) for name in spans}
    if other := sorted(adapter.parts.keys() - known):
        raise SettingsError(f"this adapter is for a model that has {other[0]}, which this one has not: {Adapter.MADE}")
    layers = []
    for index, layer in enumerate(model.weights.layers):
        sums: dict[str, Any] = {}
        for name, (linear, rows) in spans.items():
            if part := adapter.parts.get(f"layers.{index}.{name}"):
                sums.setdefault(linear, []).append((part, rows))
        made = {name: _sum(getattr(layer, name), parts) for name, parts in sums.items()}
        layers.append(replace(layer, **made))  # type: ignore[arg-type]
    return Transformer(model.config, replace(model.weights, layers=layers))


def _spans(config: ModelConfig) -> dict[str, tuple[str, slice]]:
    """By what an adapter may name, the linear layer and which of its rows that is."""
    found = {name: (name, slice(None)) for name in LINEARS}
    if config.family in ARRANGED:
        # Their checkpoints have other rows in another order.
        return found
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found |= {"q": ("qkv", slice(queries)), "k": ("qkv", slice(queries, queries + keys))}
    found |= {"v": ("qkv", slice(queries + keys, None))}
    inner = config.intermediate_size
    return found | {"gate": ("gate_up", slice(inner)), "up": ("gate_up", slice(inner, None))}


def _sum(linear: Linear, parts: list[tuple[Columns | Thin, slice]]) -> Linear:
    whole = floating(linear)
    weight = whole.weight
    for part, rows in parts:
        if not part.fits(*weight[rows].shape):
            raise SettingsError(f"this adapter is for a model of another shape: {Adapter.MADE}")
        weight[rows] = part.added(weight[rows])
    if isinstance(linear, Dense):
        return Dense(weight.to(linear.weight.dtype), linear.bias)
    return Int8Linear.quantize(weight, whole.bias)
