"""Entropic particle filtering: the draw among texts is warmed while few of them hold most of the weight early on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine

from .particle_filter import ParticleFilter
from .particles import Resample, Resampling, effective_size, normalised
from .step_nodes import Node
from .steps import Growth
from .sweep import Sweep

Annealing = Literal["ess", "entropy", "base"]

_PEAK = 2.0
"""The temperature that "base" falls from."""


@register(
    "entropic-particle-filter",
    paper="Mitigating Premature Exploitation in Particle-based Monte Carlo for Inference-Time Scaling (2025)",
    guarantee="a heuristic: what annealing favours is not taken back; least=0 and no lookahead is particle-filter, and "
    "lookahead=fresh keeps the estimated mass without a bias where nothing is annealed",
    requirements=("a scorer of beginnings and answers, between 0 and 1",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class EntropicParticleFilter(ParticleFilter):
    """A particle filter that keeps texts diverse early and can look a step ahead before resampling.

    Where the effective number of texts is below `least` of all, and less than `early` of the `rounds` are over, weights
    are taken to the power 1 / temperature for the draw: annealing "ess" makes that all / effective x (1 - share of
    rounds over), "entropy" the inverse of the normalised entropy, which is raised to 1 as rounds pass, "base" 2 - the
    share of rounds over; never below 1. Published are least=0.5, early=0.5, "ess" and systematic resampling; the
    published code has no lookahead: "fresh" is the auxiliary particle filter of the textbooks. Cost: that of
    particle-filter, with "fresh" twice as many steps and scores. The settings of weights are those of particle-filter,
    the others those of all searches over steps, see step-beam.

    Attributes:
        reward_temperature, resampling: See `particle-filter`.
        annealing: How the temperature of a draw follows from the weights: "ess", "entropy" or "base".
        least: Share of effective texts below which weights are tempered.
        early: Share of the rounds in which weights may be tempered.
        lookahead: "fresh" draws one step more after every text, counts it in the draw, and forgets it: the next weight
            is divided by what was counted; "reuse" lets that step be the next one, and counts it again as its own
            weight, or once with double_count=false.
        double_count: Whether "reuse" counts a step in the draw and again as its own weight.
    """

    resampling: Resampling = "systematic"
    annealing: Annealing = "ess"
    least: float = 0.5
    early: float = 0.5
    lookahead: Literal["fresh", "reuse"] | None = None
    double_count: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("least", "early"):
            require_number(f"{name} of {self._name}", getattr(self, name), least=0.0, most=1.0)
        if self.annealing not in ("ess", "entropy", "base"):
            raise SettingsError(f"{self._name} anneals by ess, entropy or base, not {self.annealing!r}")
        if self.lookahead not in (None, "fresh", "reuse"):
            raise SettingsError(f"lookahead of {self._name} is fresh, reuse or none, not {self.lookahead!r}")

    def explore(self, growth: Growth, resample: Resample) -> ForwardCoroutine[list[Sweep[Node]]]:
        sweep = Sweep(growth.root, self.particles, self.weighting(self.reward_temperature), resample)
        yield from self.step(growth, [sweep])
        while sweep.open:
            over = sweep.steps / self.rounds

            def anneal(log_weights: np.ndarray, over: float = over) -> float:
                return annealed(log_weights, over, self.annealing, self.least, self.early)

            if self.lookahead == "reuse":
                (gains,) = yield from self.step(growth, [sweep])
                chosen = sweep.resample(anneal=anneal)
                sweep.log_weights += self.double_count * gains[chosen]
                growth.settle(each.last for each in sweep.members)
                continue
            # Where there is one text there is nothing to draw among.
            looks = self.lookahead == "fresh" and self.particles > 1
            ahead = (yield from self._ahead(growth, sweep)) if looks else None
            sweep.resample(ahead, anneal)
            growth.settle(each.last for each in sweep.members)
            yield from self.step(growth, [sweep])
        self.record(sweep)
        count("log_normaliser", sweep.log_normaliser)
        return [sweep]

    def _ahead(self, growth: Growth, sweep: Sweep[Node]) -> ForwardCoroutine[list[float]]:
        """[particles] logs of what texts would be multiplied by after one step more, which is drawn and forgotten."""
        children, potentials = yield from self.grown(growth, sweep.parents)
        return sweep.foreseen(children, potentials)


def annealed(log_weights: np.ndarray, over: float, how: Annealing, least: float, early: float) -> float:
    """The temperature, at least 1, of resampling by weights [particles] after a share `over` of rounds."""
    share = effective_size(log_weights) / len(log_weights)
    if share >= least or over >= early:
        return 1.0
    if how == "ess":
        return max(1.0, (1 - over) / share)
    if how == "base":
        return max(1.0, _PEAK - over)
    weights = normalised(log_weights)
    held = weights[weights > 0]
    entropy = float(-(held * np.log(held)).sum()) / np.log(len(weights))
    return float(1 / min(1.0, entropy + (1 - entropy) * over))
