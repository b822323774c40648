"""Particle filtering over steps of texts, as bookkeeping: who goes on, what each is worth, who is kept.

Nothing here knows a model, or draws a step: a `Sweep` says which texts want a step, and is told of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from decodery.core.errors import SettingsError

from .weights import effective_size, log_mean, normalised

Potential = Literal["odds", "prob"]
Resample = Callable[[np.ndarray, int], list[int]]
"""So many indices, drawn by weights [n] that sum to 1."""

CLIP = 1e-7
"""How near to 0 and 1 a reward counts: the largest potential is ten million times that of an even chance."""


class State(Protocol):
    """Where a text stands after a step."""

    @property
    def finished(self) -> bool: ...


S = TypeVar("S", bound=State)


def log_potential(reward: float, kind: Potential) -> float:
    """Logarithm of what a reward in [0, 1] makes a step weigh: the reward itself, or its odds."""
    sound = min(max(reward, CLIP), 1 - CLIP)
    return math.log(sound) - (math.log1p(-sound) if kind == "odds" else 0.0)


@dataclass(frozen=True, slots=True)
class Line(Generic[S]):
    """A particle and its past.

    Attributes:
        states: [t + 1] where it stood after each step, the prompt first.
        log_potentials: [t] of its steps, -inf for one that may not live.
    """

    states: tuple[S, ...]
    log_potentials: tuple[float, ...] = ()

    @property
    def last(self) -> S:
        return self.states[-1]

    def grown(self, state: S, log_potential: float) -> Line[S]:
        return Line((*self.states, state), (*self.log_potentials, log_potential))

    def cut(self, steps: int) -> Line[S]:
        """Its first so many steps; all of them where it has no more."""
        return Line(self.states[: steps + 1], self.log_potentials[:steps])


@dataclass(frozen=True)
class Weighing:
    """How potentials become weights.

    Attributes:
        temperature: Weights are potentials to the power 1 / temperature.
        accumulation: "product" lets the potentials of all steps count, "telescoping" that of the last one, each step
            weighing its ratio to the one before.
        ended: What a text weighs in the rounds after its end: its last potential again ("compete"; in telescoping the
            ratio is then 1), or nothing more ("freeze").
    """

    temperature: float = 1.0
    accumulation: Literal["product", "telescoping"] = "product"
    ended: Literal["compete", "freeze"] = "compete"

    def log_gain(self, line: Line, step: int) -> float:
        """What a particle's weight is multiplied by after step number `step` of the sweep, from 1 on."""
        potentials = line.log_potentials
        if len(potentials) < step:
            competes = self.ended == "compete" and self.accumulation == "product"
            return potentials[-1] / self.temperature if competes else 0.0
        before = potentials[-2] if self.accumulation == "telescoping" and step > 1 else 0.0
        return (potentials[-1] - before) / self.temperature

    def log_total(self, line: Line) -> float:
        """Log of all that a text was found worth, each step counted once, at temperature 1."""
        return math.fsum(line.log_potentials) if self.accumulation == "product" else line.log_potentials[-1]


class Sweep(Generic[S]):
    """N texts between prompt and end that are resampled and continued by a step each round.

    Args:
        root: The prompt.
        reference: A finished text that is one of the N and is never lost; others may go on from its beginning.
        log_weights: [N] since the last resampling. After the last step exp(log_normaliser) estimates the mass of the
            target, without a bias where there is no reference, no annealing, and resampling draws without a bias.
        effective, ancestors: Before each resampling the effective number of texts, and how many different ones it
            chose.
    """

    def __init__(
        self, root: S, count: int, weighing: Weighing, resample: Resample, reference: Line[S] | None = None
    ) -> None:
        self.lines: list[Line[S]] = [Line((root,))] * count
        self.log_weights = np.zeros(count)
        self.effective: list[float] = []
        self.ancestors: list[int] = []
        self.steps = 0
        self._weighing = weighing
        self._resample = resample
        self._reference = reference
        self._past = 0.0

    @property
    def open(self) -> bool:
        """Whether any text goes on."""
        return any(not line.last.finished for line in self.lines)

    @property
    def parents(self) -> list[S]:
        """Of which texts `advance` wants a step; one that was copied comes several times."""
        return [line.last for line in self._free if not line.last.finished]

    @property
    def log_normaliser(self) -> float:
        return self._past + log_mean(self.log_weights)

    @property
    def weights(self) -> np.ndarray:
        """[N], summing to 1."""
        return normalised(self.log_weights)

    @property
    def _free(self) -> list[Line[S]]:
        return self.lines if self._reference is None else self.lines[1:]

    def advance(self, states: Ordered[S], log_potentials: Ordered[float]) -> np.ndarray:
        """Take a step for each of `parents`, and the log of its potential.

        Returns:
            Logs [N] of what the weights were multiplied by.

        Raises:
            SettingsError: If nothing may live.
        """
        self.steps += 1
        steps = iter(zip(states, log_potentials, strict=True))
        free = [line if line.last.finished else line.grown(*next(steps)) for line in self._free]
        self.lines = free if self._reference is None else [self._reference.cut(self.steps), *free]
        gains = np.array([self._weighing.log_gain(line, self.steps) for line in self.lines])
        self.log_weights = self.log_weights + gains
        if self.log_weights.max() == -math.inf:
            raise SettingsError("no score came for any of the texts that were weighed against each other")
        return gains

    def foreseen(self, states: Ordered[S], log_potentials: Ordered[float]) -> list[float]:
        """Logs [N] of what `advance` would multiply the weights by, if it were told of these steps."""
        steps = iter(zip(states, log_potentials, strict=True))
        lines = [line if line.last.finished else line.grown(*next(steps)) for line in self.lines]
        return [self._weighing.log_gain(line, self.steps + 1) for line in lines]

    def resample(
        self, ahead: Ordered[float] | None = None, anneal: Callable[[np.ndarray], float] = lambda log_weights: 1.0
    ) -> list[int]:
        """Keep N texts drawn by weight, and tell which [N] they were; all weigh the same then.

        Args:
            ahead: [N] logs of any guesses at what their next steps will weigh, which the draw takes into account and
                the weights then lack.
            anneal: The temperature of the draw, from the log-weights [N]; what it favours is not taken back.
        """
        guesses = np.zeros(len(self.lines)) if ahead is None else np.asarray(ahead)
        weighed = self.log_weights + guesses
        self._past += log_mean(weighed)
        weights = normalised(weighed / anneal(weighed))
        chosen = self._resample(weights, len(self._free))
        if self._reference is not None:
            chosen = [0, *chosen]
        self.effective.append(effective_size(weighed))
        self.ancestors.append(len(set(chosen)))
        self.lines = [self.lines[number] for number in chosen]
        self.log_weights = -guesses[chosen]
        return chosen

    def drawn(self) -> Line[S]:
        """One of the texts, by weight."""
        (number,) = self._resample(self.weights, 1)
        return self.lines[number]
