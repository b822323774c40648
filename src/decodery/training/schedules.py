"""A genetic search over how much each layer is pruned, with the mean over all layers fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.models.trained.token_routers import uniform

from .kind import COUNT, NON_NEGATIVE, Bounded, bounded, option


@dataclass(frozen=True)
class Evolution(Bounded):
    """How schedules are bred."""

    population: int = option(16, "Schedules of a generation of the genetic search.")
    generations: int = bounded(15, NON_NEGATIVE, "Generations of the genetic search after the first, which is random.")
    tournament: int = bounded(3, COUNT, "Schedules that are drawn for a parent; the best of them is taken.")
    moves: int = bounded(2, COUNT, "Pairs of layers between which a new schedule moves some of its share.")
    elite: int = bounded(2, COUNT, "Best schedules that are kept unchanged.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.population <= self.elite:
            raise SettingsError(
                f"a population of {self.population} is no more than an elite of {self.elite}: give more"
            )

    @property
    def tried(self) -> int:
        """How many schedules are tried."""
        return self.population + self.generations * (self.population - self.elite)


def fitted(shares: np.ndarray, total: float) -> np.ndarray:
    """The shares [n] clipped to [0, 1] and shifted evenly until their sum is `total` <= n."""
    found = np.clip(shares, 0.0, 1.0)
    missing = total - found.sum()
    room = 1.0 - found if missing > 0 else found
    filled = room.sum()
    return found + room * (missing / filled) if filled > 0 else found


def evolve(
    loss: Callable[[tuple[float, ...]], float], layers: int, sparsity: float, evolution: Evolution, seed: int
) -> tuple[tuple[float, ...], list[float]]:
    """The schedule [layers] of least loss among those tried, and all losses in the order tried.

    All of them have the mean `sparsity`, and nothing in the first and the last layer; the uniform one is tried first.
    Which are tried follows from the seed and the losses alone.
    """
    random, total = np.random.default_rng(seed), sparsity * layers
    whole = np.array(uniform(layers, sparsity))[1:-1]
    history: list[float] = []

    def judged(shares: np.ndarray) -> tuple[float, np.ndarray]:
        history.append(loss((0.0, *shares.tolist(), 0.0)))
        return history[-1], shares

    def parent() -> np.ndarray:
        drawn = random.choice(len(living), min(evolution.tournament, len(living)), replace=False)
        return living[int(drawn.min())][1]

    def child() -> np.ndarray:
        made = fitted(np.where(random.random(len(whole)) < 0.5, parent(), parent()), total)
        for _ in range(evolution.moves if len(whole) > 1 else 0):
            giver, taker = random.choice(len(whole), 2, replace=False)
            moved = random.random() * min(made[giver], 1.0 - made[taker])
            made[giver] -= moved
            made[taker] += moved
        return made

    drawn = [fitted(random.dirichlet(np.ones(len(whole))) * total, total) for _ in range(evolution.population - 1)]
    # Best first, so that the least of some places is the best of their schedules.
    living = sorted(map(judged, [whole, *drawn]), key=lambda each: each[0])
    for _ in range(evolution.generations):
        born = [child() for _ in range(evolution.population - evolution.elite)]
        living = sorted([*living[: evolution.elite], *map(judged, born)], key=lambda each: each[0])
    return (0.0, *living[0][1].tolist(), 0.0), history
