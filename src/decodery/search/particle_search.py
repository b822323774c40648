"""What searches have in common that filter particles over steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .particles import Resample, Resampling, resampler, run, uniforms
from .pool import require_count
from .step_nodes import Node, identity
from .steps import Growth, StepSearch
from .sweep import Potential, Sweep, Weighting, log_potential


@dataclass(frozen=True)
class ParticleSearch(StepSearch):
    """See the descriptions of those who have it.

    Attributes:
        step_tokens: As published.
        particles: Texts side by side.
        potential: What a reward makes a step weigh, "odds" or "prob".
        accumulation: "product" lets every step count, "telescoping" the last one alone.
        ended: Whether a text goes on to compete with its last potential after its end, or freezes.
    """

    step_tokens: int = 1024
    particles: int = 64
    potential: Potential = "odds"
    accumulation: Literal["product", "telescoping"] = "product"
    ended: Literal["compete", "freeze"] = "compete"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self._name, "particles", self.particles)
        for name, known in (
            ("potential", ("odds", "prob")),
            ("accumulation", ("product", "telescoping")),
            ("ended", ("compete", "freeze")),
        ):
            if getattr(self, name) not in known:
                raise SettingsError(f"{name} of {self._name} is {' or '.join(known)}, not {getattr(self, name)!r}")

    def weighting(self, temperature: float) -> Weighting:
        return Weighting(temperature, self.accumulation, self.ended)

    def log_potential(self, node: Node) -> float:
        """What the last step of a text weighs; nothing where its scorer failed."""
        if not node.judged:
            return -math.inf
        return log_potential(self.reward(node), self.potential)

    @property
    def draws(self) -> Resampling:
        """How texts are drawn by weight."""
        return "multinomial"

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        resample = resampler(self.draws, uniforms(growth.root.seq.request.seed))
        sweeps = yield from self.explore(growth, resample)
        return (yield from self._elected(growth, sweeps))

    @abstractmethod
    def explore(self, growth: Growth, resample: Resample) -> ForwardCoroutine[list[Sweep[Node]]]:
        """The sweeps whose texts are the results.

        Of `growth` it uses the root, and that it extends and judges.
        """

    def grown(self, growth: Growth, parents: Ordered[Node]) -> ForwardCoroutine[tuple[list[Node], list[float]]]:
        """A step after each of these texts, and what it weighs."""
        children = yield from growth.extend(parents)
        yield from growth.judge(children)
        return children, [self.log_potential(child) for child in children]

    def step(self, growth: Growth, sweeps: Ordered[Sweep[Node]]) -> ForwardCoroutine[list[np.ndarray]]:
        """A step of all texts of all these sweeps, in the same passes.

        Returns:
            What weights were multiplied by.
        """
        wanted = [sweep.parents for sweep in sweeps]
        children, weights = yield from self.grown(growth, [parent for each in wanted for parent in each])
        gains, begin = [], 0
        for sweep, each in zip(sweeps, wanted, strict=True):
            end = begin + len(each)
            gains.append(sweep.advance(children[begin:end], weights[begin:end]))
            begin = end
        return gains

    def run_on(self, growth: Growth, sweeps: Ordered[Sweep[Node]], *, alone: bool = False) -> ForwardCoroutine[None]:
        """Let these sweeps come to their ends, and record them.

        Args:
            alone: Whether all results are theirs.
        """

        def step(active: list[Sweep[Node]]) -> ForwardCoroutine[None]:
            yield from self.step(growth, active)

        def settle() -> None:
            if alone:
                growth.settle(each.last for sweep in sweeps for each in sweep.members)

        yield from run(sweeps, step, settle)
        for sweep in sweeps:
            self.record(sweep)

    def record(self, sweep: Sweep[Node]) -> None:
        """See `Particles.record`."""
        sweep.record("raise reward_temperature, take more texts, or use entropic-particle-filter")

    def _elected(self, growth: Growth, sweeps: Ordered[Sweep[Node]]) -> ForwardCoroutine[list[Sequence]]:
        """Different texts of these sweeps as results; in a vote they count what all particles with them weigh."""
        nodes: dict[Hashable, Node] = {}
        votes: dict[Hashable, float] = {}
        for sweep in sweeps:
            for trajectory, weight in zip(sweep.members, sweep.weights, strict=True):
                if weight > 0:
                    same = identity(trajectory.last.seq)
                    nodes.setdefault(same, trajectory.last)
                    votes[same] = votes.get(same, 0.0) + float(weight)
        return (yield from growth.finish(list(nodes.values()), list(votes.values())))


def require_temperature(value: float) -> None:
    """Raise SettingsError for what no potential can be raised to the inverse of."""
    require_number("reward_temperature", value, above=0.0)


def require_width(name: str, particles: int, sweeps: int) -> None:
    """Raise SettingsError where a sweep would have no text beside its reference."""
    if particles < 2 and sweeps > 1:
        raise SettingsError(f"{name} needs at least 2 particles: beside the reference nothing would be written")
