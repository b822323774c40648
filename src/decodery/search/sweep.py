"""Particles that are texts which grow by steps: their trajectories, and the weights of their steps.

Nothing here knows a model or draws a step: a `Sweep` says which texts need a step, and takes the steps drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from decodery.core.errors import SettingsError

from .particles import Particles, Resample

Potential = Literal["odds", "prob"]

CLIP = 1e-7
"""How near to 0 and 1 a reward counts: the largest potential is ten million times that of an even chance."""


class StepState(Protocol):
    """Where a text stands after a step."""

    @property
    def finished(self) -> bool: ...


S = TypeVar("S", bound=StepState)


def log_potential(reward: float, kind: Potential) -> float:
    """Logarithm of what a reward in [0, 1] makes a step weigh: the reward itself, or its odds."""
    sound = min(max(reward, CLIP), 1 - CLIP)
    return math.log(sound) - (math.log1p(-sound) if kind == "odds" else 0.0)


@dataclass(frozen=True, slots=True)
class Trajectory(Generic[S]):
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

    def grown(self, state: S, log_potential: float) -> Trajectory[S]:
        return Trajectory((*self.states, state), (*self.log_potentials, log_potential))

    def cut(self, steps: int) -> Trajectory[S]:
        """Its first so many steps; all of them where it has no more."""
        return Trajectory(self.states[: steps + 1], self.log_potentials[:steps])


@dataclass(frozen=True)
class Weighting:
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

    def log_gain(self, trajectory: Trajectory, step: int) -> float:
        """What a particle's weight is multiplied by after step number `step` of the sweep, from 1 on."""
        potentials = trajectory.log_potentials
        if len(potentials) < step:
            competes = self.ended == "compete" and self.accumulation == "product"
            return potentials[-1] / self.temperature if competes else 0.0
        before = potentials[-2] if self.accumulation == "telescoping" and step > 1 else 0.0
        return (potentials[-1] - before) / self.temperature

    def log_total(self, trajectory: Trajectory) -> float:
        """Log of all that a text was found worth, each step counted once, at temperature 1."""
        return math.fsum(trajectory.log_potentials) if self.accumulation == "product" else trajectory.log_potentials[-1]


class Sweep(Particles[Trajectory[S]]):
    """N texts on their way from a prompt to their ends, which are resampled after every step.

    Args:
        root: The prompt.
        count: N.
        weighting: How potentials become weights.
        resample: Draws indices by weights.
        reference: A finished text that is one of the N and is never lost. Others may go on from its beginning.
    """

    def __init__(
        self, root: S, count: int, weighting: Weighting, resample: Resample, reference: Trajectory[S] | None = None
    ) -> None:
        super().__init__([Trajectory((root,))] * count, resample)
        self._weighting = weighting
        self._reference = reference

    @property
    def open(self) -> bool:
        return any(not each.last.finished for each in self.members)

    @property
    def parents(self) -> list[S]:
        """The texts that `advance` wants a step of; one that was copied comes several times."""
        return [each.last for each in self._free if not each.last.finished]

    @property
    def _free(self) -> list[Trajectory[S]]:
        return self.members if self._reference is None else self.members[1:]

    def advance(self, states: Ordered[S], log_potentials: Ordered[float]) -> np.ndarray:
        """Take a step for each of `parents`, and the log of its potential.

        Returns:
            Logs [N] of what the weights were multiplied by.

        Raises:
            SettingsError: If all weights are then 0.
        """
        free = _grown(self._free, states, log_potentials)
        self.members = free if self._reference is None else [self._reference.cut(self.steps + 1), *free]
        gains = np.array([self._weighting.log_gain(each, self.steps + 1) for each in self.members])
        self.multiply(gains)
        if self.log_weights.max() == -math.inf:
            raise SettingsError("no score came for any of the texts that were weighed against each other")
        return gains

    def foreseen(self, states: Ordered[S], log_potentials: Ordered[float]) -> list[float]:
        """Logs [N] of what `advance` would multiply the weights by for these steps."""
        grown = _grown(self.members, states, log_potentials)
        return [self._weighting.log_gain(each, self.steps + 1) for each in grown]

    def chosen(self, weights: np.ndarray) -> list[int]:
        if self._reference is None:
            return super().chosen(weights)
        return [0, *self._resample(weights, len(weights) - 1)]


def _grown(
    trajectories: Ordered[Trajectory[S]], states: Ordered[S], log_potentials: Ordered[float]
) -> list[Trajectory[S]]:
    """These texts, those that had not ended one step further."""
    steps = iter(zip(states, log_potentials, strict=True))
    return [each if each.last.finished else each.grown(*next(steps)) for each in trajectories]
