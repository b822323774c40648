"""What attention itself loses under a policy: the error of what it reads, and how much of the weight it still sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Intervention
from decodery.step.cache_policy import CachePolicy

from .cases import PROMPT
from .measure import Bench, Meter

ROWS = 8
"""Rows after a prompt that are looked at."""
SINKS = 4
"""First positions, which often hold most of the weight whatever is read."""
BEST = 32
"""How many keys with the most weight are looked for."""


class Looking(Meter):
    """Notes what the rows of a pass read, by layer: keys [kv_heads, slots, head_dim], read [kv_heads, rows, slots]."""

    def __init__(self, inner: AttentionPolicy) -> None:
        super().__init__(inner)
        self.keys: dict[int, np.ndarray] = {}
        self.reads: dict[int, np.ndarray] = {}
        self.elsewhere = False

    def select(self, attention: Attention) -> np.ndarray | None:
        chosen, also = self.inner.select(attention), self.inner.also(attention)
        seen = attention.seen if chosen is None else attention.seen & chosen
        seen = seen if also is None else seen | also
        self.elsewhere = self.inner.merges and also is None
        self.keys[attention.layer] = attention.keys.float().numpy().copy()
        self.reads[attention.layer] = np.broadcast_to(seen, (len(attention.keys), *seen.shape[-2:])).copy()
        return chosen


class Weighing(AttentionPolicy):
    """Reads everything, and notes keys and weights [heads, rows, slots] by layer."""

    observes = True

    def __init__(self) -> None:
        self.keys: dict[int, np.ndarray] = {}
        self.weights: dict[int, np.ndarray] = {}

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        self.keys[attention.layer] = attention.keys.float().numpy().copy()
        self.weights[attention.layer] = attention.weights.float().numpy().copy()


@dataclass(frozen=True)
class Whole:
    """One text with all of its cache. stream: [layers, tokens, hidden] what enters each; read: [layers, ROWS, heads *
    head_dim] what attention reads there."""

    tokens: list[int]
    stream: torch.Tensor
    read: torch.Tensor
    weighing: Weighing


@dataclass
class Errors:
    """Errors of attention's output (E1), captured weight (E2) and found keys (E3), of the rows after a few prompts.

    Open loop: every layer is given what enters it without a policy, so that each loses what it loses alone. Closed
    loop: the policy acts in all layers, and errors compound.
    """

    bench: Bench
    count: int = 2
    _wholes: list[Whole] = field(default_factory=list, init=False)

    def of(self, kv: CachePolicy) -> dict[str, float]:
        """Means over texts, layers, rows and heads.

        error, error closed: of the output's length; mass, mass after the sinks, recall: shares of the full weight and
        of its `BEST` keys, where the policy reads keys as they were. Keys that it has joined count as lost.
        """
        if not self._wholes:
            self._wholes = [self._whole(text[: PROMPT + ROWS]) for text in self.bench.texts[: self.count]]
        found: dict[str, list[float]] = {}
        for whole in self._wholes:
            for loop, changes in (("error", _as_without(whole)), ("error closed", ())):
                read, looking = self._read(kv, whole.tokens, changes)
                lost = (read - whole.read).unflatten(-1, (self.bench.model.config.num_heads, -1)).norm(dim=-1)
                size = whole.read.unflatten(-1, (self.bench.model.config.num_heads, -1)).norm(dim=-1)
                found.setdefault(loop, []).append(float((lost / size.clamp_min(1e-12)).mean()))
                if changes and not looking.elsewhere:
                    for name, value in _captured(whole.weighing, looking).items():
                        found.setdefault(name, []).append(value)
        return {name: round(float(np.mean(values)), 4) for name, values in found.items()}

    def _whole(self, tokens: list[int]) -> Whole:
        layers = self.bench.model.config.num_layers
        cache = self.bench.model.new_cache()
        parts = []
        for part in (tokens[:PROMPT], tokens[PROMPT:]):
            cache.policy = weighing = Weighing()
            parts.append(self._taps(cache, part))
            cache.keep(range(len(part)))
        stream = torch.stack([torch.cat([hidden[layer] for hidden in parts]) for layer in range(layers)])
        read = torch.stack([parts[1][f"head_out.{layer}"] for layer in range(layers)])
        return Whole(tokens, stream, read, weighing)

    def _taps(
        self, cache: KVCache, tokens: Sequence[int], changes: tuple[Intervention, ...] = ()
    ) -> dict[int | str, torch.Tensor]:
        layers = self.bench.model.config.num_layers
        taps = [*range(layers), *(f"head_out.{layer}" for layer in range(layers))]
        segment = replace(Segment.chunk(tokens, cache, logit_rows=[]), interventions=changes)
        return self.bench.model.forward(Batch([segment]), taps=taps).hidden

    def _read(
        self, kv: CachePolicy, tokens: list[int], changes: tuple[Intervention, ...]
    ) -> tuple[torch.Tensor, Looking]:
        cache, _ = self.bench.start(kv, tokens[:PROMPT], PROMPT, changes)
        cache.policy = looking = Looking(cast(Meter, cache.policy).inner)
        hidden = self._taps(cache, tokens[PROMPT:], changes)
        layers = self.bench.model.config.num_layers
        return torch.stack([hidden[f"head_out.{layer}"] for layer in range(layers)]), looking


def _as_without(whole: Whole) -> tuple[Intervention, ...]:
    """Gives every layer but the first, which needs nothing, what enters it without a policy."""

    def entering(layer: int) -> Intervention:
        return Intervention(
            f"resid_pre.{layer}",
            lambda rows, segment: whole.stream[layer][torch.from_numpy(segment.positions)].to(rows),
        )

    return tuple(entering(layer) for layer in range(1, len(whole.stream)))


def _captured(whole: Weighing, looking: Looking) -> dict[str, float]:
    """Shares of the full weight, with and without the first positions, and of the best keys, that rows still read."""
    found: dict[str, list[np.ndarray]] = {"mass": [], "mass after the sinks": [], "recall": []}
    for layer, weights in whole.weights.items():
        seen = _originals(whole.keys[layer], looking.keys[layer], looking.reads[layer])
        seen = np.repeat(seen, len(weights) // len(seen), axis=0)
        caught = weights * seen
        found["mass"].append(caught.sum(axis=-1))
        beyond = weights[..., SINKS:].sum(axis=-1)
        found["mass after the sinks"].append(caught[..., SINKS:].sum(axis=-1) / np.maximum(beyond, 1e-12))
        best = np.argsort(-weights, axis=-1, kind="stable")[..., :BEST]
        found["recall"].append(np.take_along_axis(seen, best, axis=-1).mean(axis=-1))
    return {name: float(np.mean([part.mean() for part in parts])) for name, parts in found.items()}


def _originals(whole: np.ndarray, held: np.ndarray, read: np.ndarray) -> np.ndarray:
    """[kv_heads, rows, slots of the whole cache] bool: which keys are read, found by their bits wherever they lie."""
    found = np.zeros((*read.shape[:2], whole.shape[1]), dtype=bool)
    for head in range(len(whole)):
        places = {key.tobytes(): at for at, key in enumerate(whole[head])}
        for slot, key in enumerate(held[head]):
            at = places.get(key.tobytes())
            if at is not None:
                found[head, :, at] |= read[head, :, slot]
    return found
