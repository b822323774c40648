"""Sequential Monte Carlo: weighted particles, resampling schemes, and the loop of all searches that use them.

A search gives the rest: how its particles draw on (the proposal), what that multiplies their weights by, and so the
target that the weights stand for. Nothing here knows a model.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import count as numbers_from
from typing import Generic, Literal, TypeVar

import numpy as np

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.noise import RESAMPLE, draw
from decodery.step.forward_request import ForwardCoroutine

Resampling = Literal["multinomial", "systematic"]
Resample = Callable[[np.ndarray, int], list[int]]
"""So many indices, drawn by weights [n] that sum to 1."""

_EARLY = 3
"""A collapse is early within the first of so many parts of the steps."""
_FEWEST = 4
"""Among fewer particles one is often drawn alone, whatever they weigh."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Resampled:
    """One resampling.

    Attributes:
        step: After how many steps.
        effective: Effective sample size before it.
        ancestors: How many different particles it chose.
    """

    step: int
    effective: float
    ancestors: int


class Particles(Contract, Generic[P]):
    """N weighted particles on their way to a target.

    After the last step exp(log_normaliser) estimates the mass of the target: without a bias where resampling draws
    without one and nothing is annealed, moved, restarted or given as a reference.

    Args:
        members: The particles at the start, all of weight 1.
        resample: Draws indices by weights.
        threshold: Share of N below which the effective sample size calls for resampling; infinite: after every step.

    Attributes:
        log_weights: [N] natural logarithms. Resampling leaves their mean weight as it is.
        steps: How often the weights were multiplied.
        history: The resamplings so far.
    """

    moves = 0
    """How often each particle is moved after a resampling."""

    def __init__(self, members: Ordered[P], resample: Resample, threshold: float = math.inf) -> None:
        self.members = list(members)
        self.log_weights = np.zeros(len(self.members))
        self.steps = 0
        self.history: list[Resampled] = []
        self._resample = resample
        self._threshold = threshold

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether any particle goes on."""

    @property
    def log_normaliser(self) -> float:
        return log_mean(self.log_weights)

    @property
    def weights(self) -> np.ndarray:
        """[N], summing to 1."""
        return normalised(self.log_weights)

    @property
    def due(self) -> bool:
        """Whether to resample after this step."""
        needed = self.open or self.moves > 0
        return needed and effective_size(self.log_weights) / len(self.members) < self._threshold

    def multiply(self, log_factors: np.ndarray) -> None:
        """End a step: multiply the weights by exp(log_factors) [N]."""
        self.steps += 1
        self.log_weights = self.log_weights + log_factors

    def resample(
        self, ahead: Ordered[float] | None = None, anneal: Callable[[np.ndarray], float] = lambda log_weights: 1.0
    ) -> list[int]:
        """Keep N particles drawn by weight, which all weigh the same then.

        Args:
            ahead: [N] logs of any guesses at the next factors. The draw counts them, and the weights then lack them.
            anneal: The temperature of the draw, from log-weights [N]. What it favours is not taken back.

        Returns:
            Which particles [N] were kept.
        """
        guesses = np.zeros(len(self.members)) if ahead is None else np.asarray(ahead)
        weighed = self.log_weights + guesses
        chosen = self.chosen(normalised(weighed / anneal(weighed)))
        self.history.append(Resampled(self.steps, effective_size(weighed), len(set(chosen))))
        self.members = [self.members[number] for number in chosen]
        self.log_weights = log_mean(weighed) - guesses[chosen]
        return chosen

    def chosen(self, weights: np.ndarray) -> list[int]:
        """N indices, drawn by weights [N] that sum to 1."""
        return self._resample(weights, len(weights))

    def move(self) -> ForwardCoroutine[None]:
        """A step of each particle that keeps the target, after a resampling."""
        return
        yield

    def drawn(self) -> P:
        """One of the particles, by weight."""
        (number,) = self._resample(self.weights, 1)
        return self.members[number]

    def record(self, advice: str) -> None:
        """Count the resamplings in the ledger: their number, and sums of effective sizes and of ancestors.

        Warns where all particles came from one early on and no moves part them, with `advice`: what to do then.
        """
        count("resamplings", len(self.history))
        count("effective", math.fsum(each.effective for each in self.history))
        count("ancestors", sum(each.ancestors for each in self.history))
        collapsed = [each.step for each in self.history if each.ancestors == 1 and not self.moves]
        if collapsed and collapsed[0] <= self.steps // _EARLY and len(self.members) >= _FEWEST:
            count("collapsed")
            warnings.warn(
                f"all {len(self.members)} texts come from one after {collapsed[0]} of {self.steps} steps: what that "
                f"one got wrong is in all of them; {advice}",
                stacklevel=2,
            )


G = TypeVar("G", bound="Particles")


def run(
    groups: Ordered[G],
    step: Callable[[list[G]], ForwardCoroutine[None]],
    after: Callable[[], None] = lambda: None,
) -> ForwardCoroutine[None]:
    """Let all particles of these groups come to their ends.

    Args:
        groups: Particles that share their passes.
        step: Extends and weighs the particles of groups that are open.
        after: Called after each step and what follows from it.
    """
    active = list(groups)
    while active:
        yield from step(active)
        stepped = active
        # Before the resampling: where it keeps ended particles alone, they are weighed once more.
        active = [group for group in stepped if group.open]
        for group in stepped:
            if group.due:
                group.resample()
                for _ in range(group.moves):
                    yield from group.move()
        after()


def resampler(how: Resampling, uniform: Callable[[], float]) -> Resample:
    """A resampling scheme.

    systematic: as many as there are weights.

    Args:
        uniform: Numbers in (0, 1), each one once.
    """

    def drawn(weights: np.ndarray, size: int) -> list[int]:
        if how == "systematic":
            return systematic(weights, uniform())
        return multinomial(weights, [uniform() for _ in range(size)])

    return drawn


def require_resampling(name: str, value: str) -> None:
    """Raise SettingsError for an unknown resampling scheme."""
    if value not in ("multinomial", "systematic"):
        raise SettingsError(f"{name} resamples multinomial or systematic, not {value!r}")


def log_mean(log_weights: np.ndarray) -> float:
    """Log of the mean of exp(log_weights), -inf where all are."""
    top = float(log_weights.max())
    return top + math.log(float(np.exp(log_weights - top).mean())) if top > -math.inf else -math.inf


def effective_size(log_weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2, between 1 and their number; 0 where all weights are 0."""
    top = log_weights.max()
    if top == -math.inf:
        return 0.0
    weights = np.exp(log_weights - top)
    return float(weights.sum() ** 2 / (weights**2).sum())


def normalised(log_weights: np.ndarray) -> np.ndarray:
    """exp(log_weights) over their sum; at least one of them must be more than -inf."""
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def systematic(weights: np.ndarray, uniform: float) -> list[int]:
    """Indices [n]: number i comes floor or ceil of n times weights[i] often, on average exactly that.

    Args:
        weights: [n], summing to 1.
        uniform: One number in (0, 1) that shifts n equal steps.
    """
    count = len(weights)
    return np.searchsorted(_edges(weights), (np.arange(count) + uniform) / count, side="right").tolist()


def multinomial(weights: np.ndarray, uniforms: Ordered[float]) -> list[int]:
    """Indices [m], each drawn by itself: number i with probability weights[i].

    Args:
        weights: [n], summing to 1.
        uniforms: [m] numbers in (0, 1).
    """
    return np.searchsorted(_edges(weights), uniforms, side="right").tolist()


def _edges(weights: np.ndarray) -> np.ndarray:
    """[n] where the share of each particle ends."""
    edges = np.cumsum(weights)
    # The last step must meet a particle that lives, whatever the sum rounds to.
    edges[np.flatnonzero(weights)[-1] :] = np.inf
    return edges


def uniforms(seed: int) -> Callable[[], float]:
    """One number in (0, 1) after another, for a population; the first is left to the draw of the answer."""
    numbers = numbers_from(1)
    return lambda: draw(seed, next(numbers), stream=RESAMPLE)
