"""Sequential Monte Carlo over texts: weighted particles that grow block by block, are resampled and moved.

Nothing here knows a model: a `World` extends particles, and what it reports about their blocks decides their weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from decodery.core.abstract import Contract
from decodery.core.errors import ConstraintError
from decodery.step.forward_request import ForwardCoroutine, as_coroutine

from .weights import effective_size, log_mean, systematic

_TRIES = 8
"""How often a population of which nothing lives starts again."""
_NEAR = 2
"""As many of these go on from the last block; the others from the beginning."""
_FLOOR = 10.0
"""How far below the least valued particle, in nats, one stands whose rollouts all died: it may be completed yet."""


@dataclass(slots=True)
class Block:
    """Natural logarithms of what the tokens of one block weigh.

    Attributes:
        mass: The unbiased weights of what a constraint accepts, -inf for a dead end.
        request, model, drawn: Their probability under the distribution the request asks for, under the model's own, and
            under what they were drawn from.
    """

    mass: float = 0.0
    request: float = 0.0
    model: float = 0.0
    drawn: float = 0.0


@dataclass
class Particle(Contract):
    """A weighted text.

    Attributes:
        blocks: What was drawn.
        value: Log of the potential, or of the lookahead, where it stands now.
        finished: Its text has ended, so that its weight stays as it is.
    """

    blocks: list[Block] = field(default_factory=list)
    value: float = 0.0
    log_weight: float = 0.0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether its text has ended."""

    @property
    def alive(self) -> bool:
        """Whether it has not run into a dead end."""
        return not self.blocks or self.blocks[-1].mass > -math.inf


P = TypeVar("P", bound=Particle)


class World(Protocol[P]):
    """What particles live in."""

    def start(self, count: int) -> list[P] | ForwardCoroutine[list[P]]:
        """Particles that have drawn nothing yet, each with randomness of its own."""
        ...

    def extend(
        self, particles: Sequence[P], length: int | None, temperature: float = 1.0
    ) -> ForwardCoroutine[None] | None:
        """Continue until texts end or hold `length` tokens, by the distribution raised to 1 / temperature.

        None as length: until they end. Blocks are appended; a block begins at every multiple of the block's length.
        """
        ...

    def fork(self, particle: P) -> P:
        """The same text, which goes on with randomness of its own."""
        ...

    def cut(self, particle: P, block: int) -> P:
        """A fork that lost its blocks from `block` on."""
        ...

    def potentials(self, particles: Sequence[P]) -> list[float] | ForwardCoroutine[list[float]]:
        """Log-weights of their texts, begun or finished."""
        ...


@dataclass(frozen=True)
class Target:
    """Which distribution over texts is aimed at, besides its potential.

    Attributes:
        power: None for the request's distribution, else the model's own to this power.
        rollouts: How many continuations estimate what a beginning is worth, 0 to take its potential for that.
        temperature: Of the rollouts.
    """

    power: float | None = None
    rollouts: int = 0
    temperature: float = 0.1

    def log_ratio(self, block: Block) -> float:
        """Log of the target's factor over what the block was drawn from.

        Its mean over draws is the block's mass.
        """
        wanted = block.request if self.power is None else self.power * block.model
        return block.mass + wanted - block.drawn if block.mass > -math.inf else -math.inf


class Population(Generic[P]):
    """N particles on their way to a target.

    After `run`, counts tells what was done, and exp(log_normaliser) estimates the target's mass: consistently as N
    grows. With moves it is not: whether they are made depends on the particles, by their weights and by whether any
    text is still open, and a step that is taken in response to what was drawn favours some draws over others.

    Args:
        block: Tokens drawn between two looks at the weights.
        threshold: Share of N below which the effective sample size calls for resampling.
        moves: Metropolis-Hastings steps per particle after that, towards `moving`.
        uniform: Numbers in (0, 1), each one once. Its mean is the mass for any N if nothing is moved and nothing has to
            start again.
    """

    def __init__(
        self,
        world: World[P],
        count: int,
        *,
        target: Target,
        block: int,
        threshold: float,
        moves: int,
        moving: Target,
        uniform: Callable[[], float],
    ) -> None:
        self.world = world
        self.target = target
        self.moving = moving
        self.block = block
        self.threshold = threshold
        self.moves = moves
        self.uniform = uniform
        self.counts = {"resamplings": 0, "moves": 0, "moved": 0, "restarts": 0}
        self.particles: list[P] = []
        self._count = count
        self._length = 0
        self._floor: float | None = None

    @property
    def log_weights(self) -> np.ndarray:
        return np.array([particle.log_weight for particle in self.particles])

    @property
    def log_normaliser(self) -> float:
        return log_mean(self.log_weights)

    def run(self, progress: Callable[[int], None] = lambda length: None) -> ForwardCoroutine[None]:
        """Extend, weigh, resample and move until every living text has ended.

        Raises:
            ConstraintError: If none lives.
        """
        self.particles = yield from as_coroutine(self.world.start(self._count))
        while self._open():
            before = [(len(each.blocks), each.value, each.log_weight) for each in self.particles]
            yield from self._advance()
            if log_mean(self.log_weights) == -math.inf:
                self._restart(before)
            elif (self.moves or self._open()) and self._effective_share() < self.threshold:
                self._resample()
                for _ in range(self.moves):
                    yield from self._move()
            progress(self._length)

    def _effective_share(self) -> float:
        return effective_size(self.log_weights) / len(self.particles)

    def _open(self) -> list[P]:
        return [each for each in self.particles if not each.finished and each.log_weight > -math.inf]

    def _advance(self) -> ForwardCoroutine[None]:
        self._length += self.block
        active = self._open()
        yield from as_coroutine(self.world.extend(active, self._length))
        values, self._floor = yield from self._values(active, self.target, None)
        for particle, value in zip(active, values, strict=True):
            gain = self.target.log_ratio(particle.blocks[-1])
            particle.log_weight += gain + value - particle.value if value > -math.inf else -math.inf
            particle.value = value

    def _values(
        self, particles: Sequence[P], target: Target, floor: float | None
    ) -> ForwardCoroutine[tuple[list[float], float | None]]:
        """What the particles are worth, and what those count that may be completed though no rollout was.

        A value may be any positive number that is kept with its particle: the next weight divides by it. floor: None
        to find it from these particles; all that are compared with each other need the same.
        """
        living = [each for each in particles if each.alive]
        weights = yield from as_coroutine(self.world.potentials(living))
        found = dict(zip(map(id, living), weights, strict=True))
        if target.rollouts:
            ahead = [each for each in living if not each.finished and found[id(each)] > -math.inf]
            estimates = yield from self._lookahead(ahead, target)
            if floor is None:
                floor = min((each for each in estimates if each > -math.inf), default=_FLOOR) - _FLOOR
            found |= {id(each): max(value, floor) for each, value in zip(ahead, estimates, strict=True)}
        return [found.get(id(each), -math.inf) for each in particles], floor

    def _lookahead(self, particles: Sequence[P], target: Target) -> ForwardCoroutine[list[float]]:
        """Unbiased estimates of the log of the target's mass after these texts, potential included."""
        rollouts = [self.world.fork(each) for each in particles for _ in range(target.rollouts)]
        yield from as_coroutine(self.world.extend(rollouts, None, target.temperature))
        living = [each for each in rollouts if each.alive]
        ended = yield from as_coroutine(self.world.potentials(living))
        ends = dict(zip(map(id, living), ended, strict=True))
        weights = np.full(len(rollouts), -math.inf)
        for number, rollout in enumerate(rollouts):
            known = len(particles[number // target.rollouts].blocks)
            if id(rollout) in ends:
                weights[number] = sum(target.log_ratio(block) for block in rollout.blocks[known:]) + ends[id(rollout)]
        return [log_mean(row) for row in weights.reshape(len(particles), target.rollouts)]

    def _resample(self) -> None:
        self.counts["resamplings"] += 1
        weights, count = self.log_weights, len(self.particles)
        mean = log_mean(weights)
        chosen = systematic(np.exp(weights - mean) / count, self.uniform())
        self.particles = [self.world.fork(self.particles[ancestor]) for ancestor in chosen]
        for particle in self.particles:
            particle.log_weight = mean

    def _move(self) -> ForwardCoroutine[None]:
        """Offer every particle another ending, from a block of its own choice on."""
        same = self.moving == self.target
        held, floor = [each.value for each in self.particles], self._floor
        if not same:
            held, floor = yield from self._values(self.particles, self.moving, None)
        cuts = [min(int(self.uniform() * len(each.blocks)), len(each.blocks) - 1) for each in self.particles]
        offers = [self.world.cut(each, cut) for each, cut in zip(self.particles, cuts, strict=True)]
        yield from as_coroutine(self.world.extend(offers, self._length))
        values, _ = yield from self._values(offers, self.moving, floor)
        for number, (offer, cut) in enumerate(zip(offers, cuts, strict=True)):
            old = self.particles[number]
            self.counts["moves"] += 1
            ratio = move_log_ratio(self.moving, old.blocks, held[number], offer.blocks, values[number], cut)
            if math.log(self.uniform()) < ratio:
                offer.log_weight, offer.value = old.log_weight, values[number]
                self.particles[number] = offer
                self.counts["moved"] += 1
        if not same:
            living, _ = yield from self._values(self.particles, self.target, None)
            for particle, value in zip(self.particles, living, strict=True):
                particle.value = value

    def _restart(self, before: Sequence[tuple[int, float, float]]) -> None:
        """Go back by a block, and after some tries to the beginning, with fresh randomness."""
        if self.counts["restarts"] >= _TRIES:
            raise ConstraintError(
                f"none of {len(self.particles)} particles lived to its end in {_TRIES + 1} tries: use more particles, "
                "a larger max_new_tokens, or ask for something the model is likelier to write"
            )
        self.counts["restarts"] += 1
        if self.counts["restarts"] > _NEAR:
            self._length, before = 0, [(0, 0.0, 0.0)] * len(self.particles)
        else:
            self._length -= self.block
        for number, (blocks, value, weight) in enumerate(before):
            if len(self.particles[number].blocks) > blocks:
                self.particles[number] = self.world.cut(self.particles[number], blocks)
            self.particles[number].value, self.particles[number].log_weight = value, weight


def move_log_ratio(
    target: Target, old: Sequence[Block], value: float, new: Sequence[Block], offered: float, cut: int
) -> float:
    """Log of the Metropolis-Hastings ratio of replacing the blocks from `cut` on, which were drawn anew.

    The cut was one of as many as the old text has blocks; the way back has as many as the new one.

    Args:
        value, offered: What the old and the new text are worth.
    """
    if offered == -math.inf:
        return -math.inf
    gain = sum(target.log_ratio(block) for block in new[cut:]) - sum(target.log_ratio(block) for block in old[cut:])
    return gain + offered - value + math.log(len(old)) - math.log(len(new))
