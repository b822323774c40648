"""EvoPress: how many bits each layer gets under one budget, by evolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating

from .base import LINEARS, Change, ModelCompression, Part, Texts, rebuilt
from .each_linear import Made, dense, float32, lost, size_of, with_linears
from .int4 import rounded
from .stream import floats

State = tuple[int, ...]
"""The bits of every unit."""

_BITS = (2, 3, 4, 5, 6)
"""Of a weight, in the layers that a state chooses from."""
_MOST_SWITCHES = 3
_ATTEMPTS = 64
"""Draws of a child that has not been there; small spaces run out of them."""


@register(
    "evopress",
    paper="EvoPress: Towards Optimal Dynamic Model Compression via Evolutionary Search (2024)",
    guarantee="changes the output, with the bits of its uniform start; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class EvoPress(ModelCompression):
    """Searches the number of bits of each linear layer, `bits` on average, for the least distance.

    A state gives every layer 2 to 6 bits in blocks of 32; the first parent gives all of them the same, 3 to 5, so that
    some can have more and others less. A child switches one to three pairs of layers of one shape, one a bit up and one
    a bit down, so that the budget is kept to the bit. Of `children` those with the least mean KL from the original
    stay, stage after stage: `survivors` on as many tokens as `tokens` says, drawn anew in every generation; in the last
    stage the parent takes part, and one is left.

    Attributes:
        bits: Mean bits of a layer's weights.
        generations: Of the search; the published one is larger by far (150).
        children: States tried per generation (published: 128).
        survivors: States kept after each stage (published: 16/4/1).
        tokens: Of the calibration text, by stage (published: 2048/16384/131072).
        seed: Decides the search.
    """

    bits: Literal[3, 4, 5] = 3
    generations: int = 20
    children: int = 8
    survivors: tuple[int, ...] = (2, 1)
    tokens: tuple[int, ...] = (256, 1024)
    seed: int = 0

    def __post_init__(self) -> None:
        if not min(_BITS) < self.bits < max(_BITS):
            raise SettingsError(
                f"evopress cannot search from {self.bits} bits for every layer: with {min(_BITS)} to {max(_BITS)} bits "
                f"for each, none could give one to another; begin with {min(_BITS) + 1} to {max(_BITS) - 1} bits"
            )
        falling = all(a >= b for a, b in zip((self.children, *self.survivors), self.survivors, strict=False))
        if len(self.survivors) != len(self.tokens) or not falling or self.survivors[-1:] != (1,):
            raise SettingsError(
                "evopress needs a number of tokens for each of its survivors, which become fewer and end with 1"
            )
        if min(self.children, *self.tokens) < 1 or self.generations < 0:
            raise SettingsError("evopress needs at least one child and one token per stage")

    @property
    def reads(self) -> bool:
        return True

    @torch.no_grad()
    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        levels = Levels(model)
        chance = np.random.default_rng(self.seed)

        def judge(states: Sequence[State], tokens: int) -> list[float]:
            read = _some(texts, tokens, chance)
            wanted = _log_probabilities(model, read)
            return [float(_kl(wanted, _log_probabilities(levels.model(state), read))) for state in states]

        start = (self.bits,) * len(levels.groups)
        found = self.search(start, levels.groups, judge, chance, progress)
        return Change(levels.model(found), levels.parts(found))

    def search(
        self,
        start: State,
        groups: Sequence[object],
        judge: Callable[[Sequence[State], int], list[float]],
        chance: np.random.Generator,
        progress: Progress,
    ) -> State:
        """The state that evolution ends with.

        Args:
            groups: Of every unit; units of one group weigh the same.
            judge: How far states are from the original on so many tokens, all on the same ones.
        """
        parent = start
        for generation in range(self.generations):
            pool: list[State] = []
            for _ in range(_ATTEMPTS * self.children):
                child = switched(parent, groups, chance)
                if child != parent and child not in pool:
                    pool.append(child)
                if len(pool) == self.children:
                    break
            if not pool:
                raise UnsupportedModel(
                    "evopress cannot move bits between the layers of this model: no two of them have one shape; give "
                    "all layers the same bits with int4"
                )
            for stage, (survivors, tokens) in enumerate(zip(self.survivors, self.tokens, strict=True)):
                last = stage == len(self.survivors) - 1
                states = [*pool, parent] if last else pool
                order = np.argsort(judge(states, tokens), kind="stable")
                pool = [states[place] for place in order[:survivors]]
            parent = pool[0]
            progress("searching", generation + 1, self.generations)
        return parent


def switched(state: State, groups: Sequence[object], chance: np.random.Generator) -> State:
    """A state in which one to three bits moved from one unit to another of its group, if possible."""
    bits = list(state)
    for _ in range(min(chance.integers(1, _MOST_SWITCHES + 1, 2))):
        down = int(chance.integers(len(bits)))
        others = [unit for unit, group in enumerate(groups) if group == groups[down] and unit != down]
        rising = [unit for unit in others if bits[unit] < max(_BITS)]
        if bits[down] == min(_BITS) or not rising:
            continue
        bits[down] -= 1
        bits[rising[int(chance.integers(len(rising)))]] += 1
    return tuple(bits)


class _Unit(NamedTuple):
    """One linear layer at every level."""

    name: str
    made: dict[int, Made]
    errors: dict[int, float]


class Levels:
    """Every linear layer of a model at every number of bits, and models put together from them."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._layers = [float32(floats(layer, torch.float32)) for layer in model.weights.layers]
        self._units = []
        self.groups: list[tuple[int, int]] = []
        for index, layer in enumerate(self._layers):
            for name in LINEARS:
                whole = getattr(layer, name)
                made = {bits: rounded(whole, bits) for bits in _BITS}
                errors = {bits: lost(whole.weight, dense(each.linear), None) for bits, each in made.items()}
                self._units.append(_Unit(f"layers.{index}.{name}", made, errors))
                self.groups.append(whole.shape)
            # What is left of the layer are its norms.
            self._layers[index] = with_linears(layer, dict.fromkeys(LINEARS))
        head = model.weights.head
        whole = floating(head)
        self._head = head if isinstance(head, Int8Linear) else Int8Linear.quantize(whole.weight, whole.bias)
        self._head_error = 0.0 if self._head is head else lost(whole.weight, self._head.dense(), None)

    def model(self, state: State) -> Transformer:
        """The model of a state."""
        chosen = iter(unit.made[bits].linear for unit, bits in zip(self._units, state, strict=True))
        layers = [with_linears(layer, {name: next(chosen) for name in LINEARS}) for layer in self._layers]
        weights = self._model.weights
        embedding = weights.embedding.to(torch.bfloat16)
        return rebuilt(self._model, embedding=embedding, layers=layers, norm=weights.norm.float(), head=self._head)

    def parts(self, state: State) -> tuple[Part, ...]:
        """What became of every layer."""
        found = [
            Part(unit.name, unit.errors[bits], unit.made[bits].size)
            for unit, bits in zip(self._units, state, strict=True)
        ]
        return (*found, Part("head", self._head_error, size_of(self._head)))


def _some(texts: Texts, tokens: int, chance: np.random.Generator) -> list[np.ndarray]:
    """Texts in a random order, with so many tokens together or all there are; the last one is cut."""
    read, left = [], tokens
    for place in chance.permutation(len(texts)):
        if left > 0:
            read.append(texts[place][:left])
            left -= len(read[-1])
    return read


def _log_probabilities(model: Transformer, texts: Sequence[np.ndarray]) -> torch.Tensor:
    """[n, vocab] float32 of what follows each token of the texts."""
    segments = [Segment(np.arange(len(text)), tokens=text) for text in texts]
    return torch.cat([model.forward(Batch([segment])).logits.float().log_softmax(dim=-1) for segment in segments])


def _kl(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Mean over rows of KL(wanted || found), in nats."""
    terms = torch.where(wanted.isneginf(), 0.0, wanted.exp() * (wanted - found))
    return terms.sum(dim=-1).mean()
