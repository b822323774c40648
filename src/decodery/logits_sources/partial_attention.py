"""Partial attention: a second attention in every layer that reads only the prompt, however long the text is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.functional import linear, silu

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache, Snapshot
from decodery.models.config import LAYERS, ModelConfig
from decodery.models.loaders.fields import Flag
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.torch.attention import Rows, attend, rotate
from decodery.models.torch.one_pass import Pass
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.models.trained.artifact import Artifact, refuse_other, remembered
from decodery.step.logits_source import LogitsSource

__all__ = ["PartialWeights"]

_KIND = "partial attention"
_SHAPES = ("bend", "mix", "query", "key", "value", "output")


@dataclass(frozen=True, eq=False)
class PartialWeights:
    """The second attention of every layer.

    A layer without tensors has no second attention. Keys and values are made of mix(silu(bend h)) + silu(bend h).

    Attributes:
        layers: By layer, tensors by name, each [out, in] in the model's dtype: "bend" and "mix" [hidden, hidden],
            "query" [heads * head_dim, hidden], "key" and "value" [kv_heads * head_dim, hidden], "output" [hidden, heads
            * head_dim].
        reset: Whether the second attention counts positions from 0 again after the prompt, so that the n-th output
            token has the position of the n-th prompt token.
        facts: Facts of the training, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where it is unknown.
    """

    layers: tuple[dict[str, torch.Tensor], ...]
    reset: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @classmethod
    def initial(
        cls, model: Transformer, seed: int = 0, *, last: int | None = None, reset: bool = True
    ) -> PartialWeights:
        """Copy the projections of the model's attention, with a zero output, which changes no logits.

        Args:
            last: Number of last layers with a second attention, None for all.
        """
        config, generator, layers = model.config, torch.Generator().manual_seed(seed), list[dict[str, torch.Tensor]]()
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        for number, layer in enumerate(model.weights.layers):
            if last is not None and number < config.num_layers - last:
                layers.append({})
                continue
            if not isinstance(layer.qkv, Dense):
                raise UnsupportedModel(
                    "partial attention needs the model in floating point: load it with dtype='float32'"
                )
            query, key, value = (part.detach().clone() for part in layer.qkv.weight.split(sizes))
            hidden = config.hidden_size
            noise = [
                torch.randn(hidden, hidden, generator=generator, dtype=torch.float32, device="cpu") * hidden**-0.5
                for _ in range(2)
            ]
            bend, mix = (each.to(query) for each in noise)
            output = torch.zeros(hidden, sizes[0], dtype=torch.float32, device="cpu").to(query)
            layers.append(dict(zip(_SHAPES, (bend, mix, query, key, value, output), strict=True)))
        return cls(tuple(layers), reset, model=model.fingerprint)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, the same objects, to save or to train them."""
        return {f"{index}.{name}": each for index, layer in enumerate(self.layers) for name, each in layer.items()}

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        facts = {**self.facts, "layers": len(self.layers), "reset": self.reset}
        Artifact(_KIND, self.tensors(), facts, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> PartialWeights:
        """Read what `save` wrote, as `dtype`.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: If the file was not written by `save`, or is damaged.
        """
        return _load(path, config, dtype)


@remembered
def _load(path: Path, config: ModelConfig, dtype: torch.dtype) -> PartialWeights:
    made = "make one with decodery train partial -m MODEL"
    found = Artifact.read(path, _KIND, made, {"layers": LAYERS, "reset": Flag()})
    having = {name.partition(".")[0] for name in found.tensors}
    try:
        layers = tuple(
            {name: found.tensors[f"{i}.{name}"].to(dtype) for name in _SHAPES} if str(i) in having else {}
            for i in range(config.num_layers)
        )
    except KeyError as error:
        raise CorruptFile(f"{path} was made for a model of another shape: train it for this one") from error
    _check(layers, config, str(path))
    return PartialWeights(layers, bool(found.facts["reset"]), found.facts, found.model)


def _check(layers: Sequence[Mapping[str, torch.Tensor]], config: ModelConfig, what: str) -> None:
    hidden, dim = config.hidden_size, config.head_dim
    rows = (hidden, hidden, config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim)
    shapes = [(n, hidden) for n in rows] + [(hidden, config.num_heads * dim)]
    if any(layer and [tuple(layer[name].shape) for name in _SHAPES] != shapes for layer in layers):
        raise CorruptFile(f"{what} was made for a model of another shape: train it for this one")


@register(
    "partial-attention",
    paper="Decoder-Only or Encoder-Decoder? Interpreting Language Model as a Regularized Encoder-Decoder (2023)",
    guarantee="the model's distribution until it is trained",
    requirements=("weights made by `decodery train partial -m MODEL PAIRS --out DIR`",),
)
@dataclass(frozen=True)
class PartialAttention(LogitsSource):
    """Adds a second attention to every layer, whose keys and values are only those of the prompt.

    Every row attends to the prompt up to its own position, so that the prompt may be read in chunks. If the weights
    were trained so, output tokens count their positions from 0 in this attention; the paper does so in both. Before
    training, the weights change no logits. Cost: one more attention per layer, and keys and values of the prompt.

    Attributes:
        weights: `PartialWeights`, or the file that `decodery train partial` wrote.
    """

    weights: PartialWeights | str

    provides = Provides(taps=True, keys=True, states=True, parts=True)

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        if not isinstance(model, Transformer) or not isinstance(model.weights.layers[0].qkv, Dense):
            raise UnsupportedModel("partial attention needs the model in floating point: load it with dtype='float32'")
        weights = _load(self.weights, model.config, model.dtype) if isinstance(self.weights, str) else self.weights
        if len(weights.layers) != model.config.num_layers:
            raise CorruptFile("this partial attention was made for a model of another depth: train it for this one")
        refuse_other("this partial attention", weights.model, model, "train it for this one")
        return PartialTransformer(model, weights, len(prompt))


class PartialCache(KVCache):
    """The model's own cache, and that of the second attention, which has `source_length` positions."""

    source_length: int
    source: KVCache
    _rows: np.ndarray
    _below: WeakKeyDictionary[Snapshot, Snapshot]

    @classmethod
    def beside(cls, config: ModelConfig, source_length: int, dtype: torch.dtype, device: torch.device) -> PartialCache:
        """Nothing read yet."""
        shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        cache = cls(*shape, dtype=dtype, device=device)
        cache.source_length = source_length
        cache.source = KVCache(*shape, dtype=dtype, device=device)
        cache._rows = np.zeros(0, dtype=np.int64)
        cache._below = WeakKeyDictionary()
        return cache

    @property
    def slot_bytes(self) -> int:
        return super().slot_bytes + self.source.slot_bytes

    def reserve(self, positions: np.ndarray, retained: int = 0, layers: Sequence[int] | None = None) -> None:
        super().reserve(positions, retained, layers)
        kept, new = self._rows[self._rows < retained], np.flatnonzero(positions < self.source_length)
        self._rows = np.concatenate((kept, retained + new))
        self.source.reserve(positions[new], len(kept), layers)

    def keep(self, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        super().keep(rows, layers)
        self.source.keep([int(place) for place in np.flatnonzero(np.isin(self._rows, list(rows)))], layers)

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        self._below[snapshot] = self.source.snapshot()
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self.source.restore(self._below[snapshot])

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.source.truncate(n)

    def fork(self) -> Self:
        clone = super().fork()
        clone.source_length, clone.source, clone._rows = self.source_length, self.source.fork(), self._rows
        clone._below = WeakKeyDictionary(self._below)
        return clone


class PartialTransformer(Transformer):
    """A `Transformer` with a second attention to the first `source_length` positions of each text.

    Two of them with the same model and weights are equal, because the source length of a text is in its cache.
    """

    def __init__(self, base: Transformer, partial: PartialWeights, source_length: int) -> None:
        super().__init__(base.config, base.weights)
        # Passes of fixed shape support only one attention per layer.
        self.static = None
        self._tables = base._tables
        self.base, self.partial, self.source_length = base, partial, source_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartialTransformer) and (self.base, self.partial) == (other.base, other.partial)

    def __hash__(self) -> int:
        return hash((self.base, self.partial))

    def new_cache(self) -> KVCache:
        return PartialCache.beside(self.config, self.source_length, self.dtype, self.device)

    def _beside(self, index: int, normed: torch.Tensor, step: Rows) -> torch.Tensor | None:
        assert isinstance(step, Pass)
        weights, config = self.partial.layers[index], self.config
        if not weights:
            return None
        cos, sin = step.angles(index)
        asked = linear(normed, weights["query"]).view(-1, config.num_heads, config.head_dim)
        queries = rotate(asked, *(self._reset(index, step) if self.partial.reset else (cos, sin)))
        parts = []
        for segment, first, last in step.spans:
            length = self._length(segment)
            rows = np.flatnonzero(segment.positions < length)
            slots = segment.positions[rows]
            at = torch.from_numpy(rows + first).to(self.device)
            bent = silu(linear(normed[at], weights["bend"]))
            source = bent + linear(bent, weights["mix"])
            shape = (-1, config.num_kv_heads, config.head_dim)
            keys = rotate(linear(source, weights["key"]).view(shape), cos[at], sin[at])
            values = linear(source, weights["value"]).view(shape)
            if isinstance(segment.cache, PartialCache):
                kept = segment.cache.source
                kept.write(index, keys, values)
                seen_keys, seen_values = kept.view(index)
                slots = kept.positions[index, : kept.length + kept.tentative]
            else:
                seen_keys, seen_values = keys.transpose(0, 1), values.transpose(0, 1)
            seen = slots[None, :] <= segment.positions[:, None]
            mask = None if seen.all() else torch.from_numpy(seen).to(self.device)
            parts.append(attend(queries[first:last], seen_keys, seen_values, mask, config.attention_scale))
        return linear(torch.cat(parts), weights["output"])

    def _length(self, segment: Segment) -> int:
        return segment.cache.source_length if isinstance(segment.cache, PartialCache) else self.source_length

    def _reset(self, index: int, step: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary angles of the rows as queries; after the prompt, positions start at 0 again."""
        lengths = np.concatenate([np.full(last - first, self._length(segment)) for segment, first, last in step.spans])
        positions = np.where(step.positions < lengths, step.positions, step.positions - lengths)
        cos, sin = self.angles(self.config.layer_rope(index), positions)
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)
