"""Particle filtering over steps: rewards weigh texts, and by their weights they are copied or left."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .particle_search import ParticleSearch, require_temperature
from .particles import Resample, Resampling, require_resampling
from .step_nodes import Node
from .steps import Growth
from .sweep import Sweep


@register(
    "particle-filter",
    paper="A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using Particle-Based Monte Carlo "
    "Methods (2025)",
    guarantee="texts by weight follow the request's distribution times the potentials, exactly as particles grow in "
    "number; one is plain decoding; the best text is no draw from it",
    requirements=("a scorer of beginnings and answers, between 0 and 1",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class ParticleFilter(ParticleSearch):
    """Grows `particles` texts step by step and resamples them by reward with replacement.

    A step weighs its potential to the power 1 / reward_temperature: with potential "odds", as published, r / (1 - r) of
    its reward r, with "prob" r itself, clipped to 1e-7 from 0 and 1. Ledger: the log of the estimated mass of the
    target (log_normaliser, whose exponential has no bias), and sums over resamplings of the effective number of texts
    and of different texts kept (effective, ancestors). The other settings are those of all searches over steps, see
    step-beam. A text whose score fails is left. A warning tells where all texts come from one after a third of the
    steps. Published are particles=64 (of 1 to 128), reward_temperature=1, odds, product, compete, multinomial,
    rounds=40, a sampling temperature of 0.8 and the best text as the answer; prob, telescoping, freeze, systematic and
    choose=vote are not. Cost: a step and a score of every text a round.

    Attributes:
        reward_temperature: Potentials are taken to the power 1 / this.
        resampling: "multinomial" draws each text by itself, "systematic" copies it as often as its share of them says,
            rounded.
        accumulation: "product", as published, has the potentials of all steps count in a text's weight, "telescoping"
            that of its last step alone.
        ended: What has ended is drawn among the others by its last potential, once more in every round ("compete", as
            published), or weighs no more ("freeze", which alone keeps the distribution where texts end after different
            numbers of steps).
        choose: Best returns the texts by worth, vote one for each of their answers by the summed weights of texts.
    """

    reward_temperature: float = 1.0
    resampling: Resampling = "multinomial"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_temperature(self.reward_temperature)
        require_resampling(self._name, self.resampling)

    @property
    def draws(self) -> Resampling:
        return self.resampling

    def explore(self, growth: Growth, resample: Resample) -> ForwardCoroutine[list[Sweep[Node]]]:
        sweep = Sweep(growth.root, self.particles, self.weighting(self.reward_temperature), resample)
        yield from self.run_on(growth, [sweep], alone=True)
        count("log_normaliser", sweep.log_normaliser)
        return [sweep]
