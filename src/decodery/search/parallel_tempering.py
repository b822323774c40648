"""Parallel tempering over steps: chains of particle Gibbs at several temperatures, which exchange their texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .particle_search import ParticleSearch, require_temperature, require_width
from .particles import Resample
from .pool import require_count
from .step_nodes import Node
from .steps import Growth
from .sweep import Sweep, Trajectory


@register(
    "parallel-tempering",
    paper="A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using Particle-Based Monte Carlo "
    "Methods (2025)",
    guarantee="sweeps and exchanges leave the distribution of all chains as it is, if texts have equally many steps "
    "or ended=freeze; the best text is no draw from it",
    requirements=("a scorer of beginnings and answers, between 0 and 1",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class ParallelTempering(ParticleSearch):
    """Chains of particle Gibbs whose rewards count less and less, between which references are exchanged.

    The chains share their passes. Not in the published code, but as its paper has it; particles, sweeps and
    temperatures are no published ones. Ledger: exchanges offered and made. The settings of weights are those of
    particle-filter, the others those of all searches over steps, see step-beam.

    Attributes:
        particles: Texts of each chain.
        temperatures: Of the rewards, one per chain and rising; chain k aims at the request's distribution times the
            potentials to the power 1 / temperatures[k]. After each sweep but the last, neighbours exchange their
            references with a probability that leaves both distributions as they are: a text that only a warm chain
            dares to write can so come to the coldest, whose texts of the last sweep are the results.
        sweeps: Sweeps of every chain.
    """

    particles: int = 8
    temperatures: tuple[float, ...] = (1.0, 2.0)
    sweeps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self._name, "sweeps", self.sweeps)
        require_width(self._name, self.particles, self.sweeps)
        for temperature in self.temperatures:
            require_temperature(temperature)
        if len(self.temperatures) < 2 or list(self.temperatures) != sorted(set(self.temperatures)):
            raise SettingsError(f"temperatures of chains are two or more that rise, not {self.temperatures}")

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.particles * len(self.temperatures)

    def explore(self, growth: Growth, resample: Resample) -> ForwardCoroutine[list[Sweep[Node]]]:
        chains = [self.weighting(temperature) for temperature in self.temperatures]
        references: list[Trajectory[Node] | None] = [None] * len(chains)
        for number in range(self.sweeps):
            sweeps = [
                Sweep(growth.root, self.particles, weighting, resample, reference)
                for weighting, reference in zip(chains, references, strict=True)
            ]
            yield from self.run_on(growth, sweeps)
            if number + 1 < self.sweeps:
                references = list(self.exchanged([sweep.drawn() for sweep in sweeps], resample))
        return sweeps[:1]

    def exchanged(self, references: list[Trajectory[Node]], resample: Resample) -> list[Trajectory[Node]]:
        """The chains' references after neighbours were offered each other's, the coldest pair first."""
        total = self.weighting(1.0).log_total
        for k in range(len(references) - 1):
            count("exchanges_offered")
            ours, theirs = references[k : k + 2]
            ratio = swap_log_ratio(total(ours), total(theirs), *self.temperatures[k : k + 2])
            chance = math.exp(min(0.0, ratio))
            if resample(np.array([chance, 1 - chance]), 1) == [0]:
                count("exchanges")
                references[k : k + 2] = theirs, ours
        return references


def swap_log_ratio(cold: float, warm: float, cold_temperature: float, warm_temperature: float) -> float:
    """Log of the Metropolis ratio of exchanging two chains' texts; the model's distribution cancels.

    Args:
        cold, warm: Log of all that the chains' texts were found worth, at temperature 1.
    """
    return (1 / cold_temperature - 1 / warm_temperature) * (warm - cold)
