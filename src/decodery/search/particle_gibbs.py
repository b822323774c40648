"""Particle Gibbs over steps: particle filters one after the other, each with a text of the one before among its own."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .particle_search import ParticleSearch, require_temperature, require_width
from .particles import Resample
from .pool import require_count
from .step_nodes import Node
from .steps import Growth
from .sweep import Sweep, Trajectory


@register(
    "particle-gibbs",
    paper="A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using Particle-Based Monte Carlo "
    "Methods (2025)",
    guarantee="a sweep leaves the request's distribution times the potentials as it is, for 2 particles or more, if "
    "texts have equally many steps or ended=freeze; the best text is no draw from it",
    requirements=("a scorer of beginnings and answers, between 0 and 1",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class ParticleGibbs(ParticleSearch):
    """Sweeps of particle filtering that each keep one text drawn from the sweep before.

    That reference is weighed after every step of the sweep by its own step of the same number, is never lost, and lends
    its beginning to texts that are drawn from it. Texts are drawn each by itself (multinomial resampling), for which
    the distribution is known. The settings of weights are those of particle-filter, the others those of all searches
    over steps, see step-beam. particles=16 and sweeps=4 are no published numbers: they write the 64 texts of the
    published filter. Cost: that of particle-filter in the first sweep, a step and a score a round less in the others.

    Attributes:
        reward_temperature: Potentials are taken to the power 1 / this.
        sweeps: Particle filters run one after another.
        pool: Whether the texts of all sweeps are results, or those of the last one.
    """

    particles: int = 16
    reward_temperature: float = 1.0
    sweeps: int = 4
    pool: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_temperature(self.reward_temperature)
        require_count(self._name, "sweeps", self.sweeps)
        require_width(self._name, self.particles, self.sweeps)

    def explore(self, growth: Growth, resample: Resample) -> ForwardCoroutine[list[Sweep[Node]]]:
        weighting = self.weighting(self.reward_temperature)
        done: list[Sweep[Node]] = []
        reference: Trajectory[Node] | None = None
        for _ in range(self.sweeps):
            sweep = Sweep(growth.root, self.particles, weighting, resample, reference)
            yield from self.run_on(growth, [sweep])
            reference = sweep.drawn()
            done = [*done, sweep] if self.pool else [sweep]
        return done
