"""Particles that are texts which grow block by block: their targets, lookahead, moves and restarts.

Nothing here knows a model: a `Proposal` extends particles, and their weights come from what it reports of their blocks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from decodery.core.abstract import Contract
from decodery.core.errors import ConstraintError
from decodery.step.forward_request import ForwardCoroutine, as_coroutine

from .particles import Particles, log_mean, resampler, run

_TRIES = 8
"""How often a population of which nothing lives starts again."""
_NEAR = 2
"""As many of these go on from the last block; the others from the beginning."""
_FLOOR = 10.0
"""How far below the least valued particle, in nats, one stands whose rollouts all died: it may be completed yet."""


@dataclass(slots=True)
class TokenBlock:
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

    blocks: list[TokenBlock] = field(default_factory=list)
    value: float = 0.0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether its text has ended."""

    @property
    def alive(self) -> bool:
        """Whether it has not run into a dead end."""
        return not self.blocks or self.blocks[-1].mass > -math.inf


P = TypeVar("P", bound=Particle)


class Proposal(Protocol[P]):
    """How particles are drawn."""

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
class TargetDistribution:
    """Which distribution over texts is aimed at, besides its potential.

    Attributes:
        power: None for the request's distribution, else the model's own to this power.
        rollouts: How many continuations estimate what a beginning is worth, 0 to take its potential for that.
        temperature: Of the rollouts.
    """

    power: float | None = None
    rollouts: int = 0
    temperature: float = 0.1

    def log_ratio(self, block: TokenBlock) -> float:
        """Log of the target's factor over what the block was drawn from.

        Its mean over draws is the block's mass.
        """
        wanted = block.request if self.power is None else self.power * block.model
        return block.mass + wanted - block.drawn if block.mass > -math.inf else -math.inf


class Population(Particles[P]):
    """Particles that a proposal extends by blocks, until every living text has ended.

    With moves the mean of the estimated mass is another than the mass, which it comes near as N grows: whether moves
    are made hangs on the particles, by their weights and by whether any text is still open, and a step that is taken in
    response to what was drawn favours some draws over others. Restarts have the same effect.

    Args:
        proposal: Draws the particles.
        count: N.
        target: What the weights stand for.
        block: Tokens drawn between two looks at the weights.
        threshold: See `Particles`.
        moves: Metropolis-Hastings steps per particle after a resampling.
        moving: What the moves aim at.
        uniform: Numbers in (0, 1), each one once.

    Attributes:
        counts: Moves offered and made, and restarts.
    """

    def __init__(
        self,
        proposal: Proposal[P],
        count: int,
        *,
        target: TargetDistribution,
        block: int,
        threshold: float,
        moves: int,
        moving: TargetDistribution,
        uniform: Callable[[], float],
    ) -> None:
        super().__init__((), resampler("systematic", uniform), threshold)
        self.proposal = proposal
        self.target = target
        self.moving = moving
        self.block = block
        self.moves = moves
        self.uniform = uniform
        self.counts = {"moves": 0, "moved": 0, "restarts": 0}
        self._count = count
        self._floor: float | None = None

    @property
    def open(self) -> bool:
        return bool(self._open())

    def run(self, progress: Callable[[int], None] = lambda length: None) -> ForwardCoroutine[None]:
        """Extend, weigh, resample and move until every living text has ended.

        Args:
            progress: Called with the length of texts after each block.

        Raises:
            ConstraintError: If none lives.
        """
        self.members = yield from as_coroutine(self.proposal.start(self._count))
        self.log_weights = np.zeros(self._count)
        while self.open:
            # A move may replace an ended text by an open one.
            yield from run([self], lambda _: self._step(), lambda: progress(self._length))

    @property
    def _length(self) -> int:
        return self.steps * self.block

    def _open(self) -> list[int]:
        return [n for n, weight in enumerate(self.log_weights) if weight > -math.inf and not self.members[n].finished]

    def _step(self) -> ForwardCoroutine[None]:
        before, weights = [(len(each.blocks), each.value) for each in self.members], self.log_weights
        yield from self._advance()
        if self.log_normaliser == -math.inf:
            self._restart(before, weights)

    def _advance(self) -> ForwardCoroutine[None]:
        numbers = self._open()
        active = [self.members[number] for number in numbers]
        yield from as_coroutine(self.proposal.extend(active, self._length + self.block))
        values, self._floor = yield from self._values(active, self.target, None)
        gains = np.zeros(len(self.members))
        for number, particle, value in zip(numbers, active, values, strict=True):
            gain = self.target.log_ratio(particle.blocks[-1])
            gains[number] = gain + value - particle.value if value > -math.inf else -math.inf
            particle.value = value
        self.multiply(gains)

    def _values(
        self, particles: Sequence[P], target: TargetDistribution, floor: float | None
    ) -> ForwardCoroutine[tuple[list[float], float | None]]:
        """What the particles are worth, and what those count that may be completed though no rollout was.

        A value may be any positive number that is kept with its particle: the next weight divides by it. floor: None
        to find it from these particles; all that are compared with each other need the same.
        """
        living = [each for each in particles if each.alive]
        weights = yield from as_coroutine(self.proposal.potentials(living))
        found = dict(zip(map(id, living), weights, strict=True))
        if target.rollouts:
            ahead = [each for each in living if not each.finished and found[id(each)] > -math.inf]
            estimates = yield from self._lookahead(ahead, target)
            if floor is None:
                floor = min((each for each in estimates if each > -math.inf), default=_FLOOR) - _FLOOR
            found |= {id(each): max(value, floor) for each, value in zip(ahead, estimates, strict=True)}
        return [found.get(id(each), -math.inf) for each in particles], floor

    def _lookahead(self, particles: Sequence[P], target: TargetDistribution) -> ForwardCoroutine[list[float]]:
        """Unbiased estimates of the log of the target's mass after these texts, potential included."""
        rollouts = [self.proposal.fork(each) for each in particles for _ in range(target.rollouts)]
        yield from as_coroutine(self.proposal.extend(rollouts, None, target.temperature))
        living = [each for each in rollouts if each.alive]
        ended = yield from as_coroutine(self.proposal.potentials(living))
        ends = dict(zip(map(id, living), ended, strict=True))
        weights = np.full(len(rollouts), -math.inf)
        for number, rollout in enumerate(rollouts):
            known = len(particles[number // target.rollouts].blocks)
            if id(rollout) in ends:
                weights[number] = sum(target.log_ratio(block) for block in rollout.blocks[known:]) + ends[id(rollout)]
        return [log_mean(row) for row in weights.reshape(len(particles), target.rollouts)]

    def resample(self, *arguments: Any, **named: Any) -> list[int]:
        chosen = super().resample(*arguments, **named)
        self.members = [self.proposal.fork(each) for each in self.members]
        return chosen

    def move(self) -> ForwardCoroutine[None]:
        """Offer every particle another ending, from a block of its own choice on."""
        same = self.moving == self.target
        held, floor = [each.value for each in self.members], self._floor
        if not same:
            held, floor = yield from self._values(self.members, self.moving, None)
        cuts = [min(int(self.uniform() * len(each.blocks)), len(each.blocks) - 1) for each in self.members]
        offers = [self.proposal.cut(each, cut) for each, cut in zip(self.members, cuts, strict=True)]
        yield from as_coroutine(self.proposal.extend(offers, self._length))
        values, _ = yield from self._values(offers, self.moving, floor)
        for number, (offer, cut) in enumerate(zip(offers, cuts, strict=True)):
            old = self.members[number]
            self.counts["moves"] += 1
            ratio = move_log_ratio(self.moving, old.blocks, held[number], offer.blocks, values[number], cut)
            if math.log(self.uniform()) < ratio:
                offer.value = values[number]
                self.members[number] = offer
                self.counts["moved"] += 1
        if not same:
            living, _ = yield from self._values(self.members, self.target, None)
            for particle, value in zip(self.members, living, strict=True):
                particle.value = value

    def _restart(self, before: Sequence[tuple[int, float]], weights: np.ndarray) -> None:
        """Go back by a block, and after some tries to the beginning, with fresh randomness."""
        if self.counts["restarts"] >= _TRIES:
            raise ConstraintError(
                f"none of {len(self.members)} particles lived to its end in {_TRIES + 1} tries: use more particles, "
                "a larger max_new_tokens, or ask for something the model is likelier to write"
            )
        self.counts["restarts"] += 1
        if self.counts["restarts"] > _NEAR:
            self.steps, before, weights = 0, [(0, 0.0)] * len(self.members), np.zeros(len(self.members))
        else:
            self.steps -= 1
        self.log_weights = weights
        for number, (blocks, value) in enumerate(before):
            if len(self.members[number].blocks) > blocks:
                self.members[number] = self.proposal.cut(self.members[number], blocks)
            self.members[number].value = value


def move_log_ratio(
    target: TargetDistribution,
    old: Sequence[TokenBlock],
    value: float,
    new: Sequence[TokenBlock],
    offered: float,
    cut: int,
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
