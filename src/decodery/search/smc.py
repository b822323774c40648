"""Sequential Monte Carlo: texts from the model's distribution given a constraint and a potential."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.noise import RESAMPLE, draw
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer
from decodery.step.sequence import Sequence

from .base import Branches, Search
from .model_proposal import Branch, ModelProposal, same_texts
from .particles import uniforms
from .population import Population, TargetDistribution

__all__ = ["Posterior"]


@dataclass(frozen=True)
class Posterior:
    """Weighted texts.

    Attributes:
        sequences: n finished ones, all of positive weight.
        log_weights: [n] natural logarithms, their exponentials summing to 1.
        log_normaliser: Log of an estimate of the target's mass, whose mean is that mass without moves and restarts;
            with either it is biased for few particles, and with strict=false of no target.
        counts: Resamplings, moves offered and made, restarts.
    """

    sequences: list[Sequence]
    log_weights: np.ndarray
    log_normaliser: float
    counts: dict[str, int]


@register(
    "smc",
    paper="Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling (2025)",
    guarantee="the posterior over texts, exactly as particles grow in number; strict=false is a heuristic",
)
@dataclass(frozen=True)
class SMC(Search):
    """Draws from the model's distribution over whole texts, given a constraint, a potential or both.

    A mask alone keeps tokens whose completions are unlikely at their full weight; here weighted particles are drawn
    token by token, resampled, and count by what their texts are worth. Ledger and the warning of a collapse: as of
    particle-filter. Texts that do not end within max_new_tokens are ended there and count by the probability of that.
    Sources: the above for constraints, Sampling for Quality for potentials, lookahead and moves.

    Attributes:
        particles: Texts in progress, one cache each.
        block: Tokens between two looks at the weights.
        target: "tempered" is the distribution of the request, "powered" the model's own probability of a text to the
            `power`.
        power: Of the powered target.
        potential: A scorer of whole texts, whose logarithms are multiplied by `strength`; what it says of beginnings
            only guides.
        strength: Multiplies the logarithms of the potential.
        lookahead: Rollouts per particle and block, at rollout_temperature, that estimate what a beginning leads to,
            which gives the weights of single runs heavy tails, the more so the lower that temperature is; 0 takes its
            potential for that.
        rollout_temperature: Of the rollouts.
        moves: Metropolis-Hastings steps per particle after resampling, from a random block on; None: 1 and 0 without a
            potential, 64 and 2 with one.
        threshold: Resampling below this share of effective particles.
        accepts, max_rejects: Of a constraint's weights, see `sampling.awrs`; None is unlimited.
        strict: One target throughout; else, as published, weights are those of the tempered target without lookahead
            and moves go to the powered one with it.
        answer: "majority" ranks texts by the weight of all their particles, "heaviest" by their heaviest one, "draw"
            returns one text drawn by weight; scores are the logarithms of these weights.
    """

    particles: int = 16
    block: int | None = None
    target: Literal["tempered", "powered"] = "tempered"
    power: float = 4.0
    potential: Scorer | str | None = None
    strength: float = 1.0
    lookahead: int = 0
    rollout_temperature: float = 0.1
    moves: int | None = None
    threshold: float = 0.5
    accepts: int = 2
    max_rejects: int | None = None
    strict: bool = True
    answer: Literal["majority", "heaviest", "draw"] = "majority"

    requirements = Requirements(rows=True, alone=True, chance=True, law=True)

    def __post_init__(self) -> None:
        least = {"particles": 1, "block": 1, "lookahead": 0, "moves": 0, "accepts": 2, "max_rejects": 2}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < smallest):
                raise SettingsError(f"smc needs {name} of at least {smallest}, an integer, not {value!r}")
        for name in ("power", "strength", "rollout_temperature"):
            require_number(name, getattr(self, name), above=0.0)
        require_number("threshold", self.threshold, least=0.0, most=1.0)
        for name, known in (("target", ("tempered", "powered")), ("answer", ("majority", "heaviest", "draw"))):
            if getattr(self, name) not in known:
                raise SettingsError(f"the {name} of smc is {', '.join(known)}, not {getattr(self, name)!r}")
        if self.potential is not None:
            object.__setattr__(self, "potential", resolve("scorer", self.potential))
            if not self.scorer.answers:
                raise SettingsError("the potential of smc counts in the end: give a scorer of answers")
        if not self.strict and self.target != "tempered":
            raise SettingsError("strict=false grows texts towards the tempered target: leave target out")

    def bind(self, tokenizer: Tokenizer) -> SMC:
        return self if self.potential is None else replace(self, potential=self.scorer.bind(tokenizer))

    @property
    def scorer(self) -> Scorer:
        assert isinstance(self.potential, Scorer)
        return self.potential

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = self._branches(engine, request)
        posterior = yield from self._posterior(branches, request, progress)
        same, weights = same_texts(posterior.sequences), np.exp(posterior.log_weights)
        masses = np.bincount(same, weights, minlength=len(same))
        # Of equal texts the heaviest particle stands for all.
        order = np.argsort(-weights, kind="stable")
        _, first = np.unique(same[order], return_index=True)
        distinct = order[first]
        scores = weights[distinct] if self.answer == "heaviest" else masses[same[distinct]]
        if self.answer == "draw":
            at = int(np.searchsorted(np.cumsum(scores), draw(request.seed, 0, stream=RESAMPLE) * scores.sum()))
            distinct, scores = distinct[at : at + 1], scores[at : at + 1]
        found = []
        for place in np.argsort(-scores, kind="stable"):
            seq = posterior.sequences[distinct[place]]
            seq.score = math.log(min(1.0, scores[place]))
            found.append(seq)
        return branches.finish(found)

    def posterior(self, engine: Engine, request: Request, progress: Progress = silent) -> Posterior:
        """The weighted texts themselves. Raises as `run` does; a scorer must be bound."""

        def find() -> ForwardCoroutine[Posterior]:
            branches = self._branches(engine, request)
            found = yield from self._posterior(branches, request, progress)
            branches.finish(found.sequences)
            return found

        return engine.finish(find())

    def _branches(self, engine: Engine, request: Request) -> Branches:
        branches = Branches(engine, request, self)
        if self.potential is not None:
            self.scorer.fits(branches.model)
        return branches

    def _posterior(self, branches: Branches, request: Request, progress: Progress) -> ForwardCoroutine[Posterior]:
        rewarded = self.potential is not None
        block = self.block or (64 if rewarded else 1)
        steps, moving = self._targets()
        proposal = ModelProposal(
            branches,
            block=block,
            potential=self.scorer if rewarded else None,
            strength=self.strength,
            powered=moving.power is not None,
            accepts=self.accepts,
            max_rejects=math.inf if self.max_rejects is None else self.max_rejects,
        )
        population: Population[Branch] = Population(
            proposal,
            self.particles,
            target=steps,
            block=block,
            threshold=self.threshold,
            moves=(2 if rewarded else 0) if self.moves is None else self.moves,
            moving=moving,
            uniform=uniforms(request.seed),
        )
        most = branches.root.request.max_new_tokens
        yield from population.run(lambda length: progress("smc", min(length, most), most))
        for name, amount in population.counts.items():
            if amount:
                count(name, amount)
        population.record("use more particles, or moves")
        living = np.flatnonzero(population.log_weights > -math.inf)
        total = population.log_normaliser + math.log(self.particles)
        return Posterior(
            [population.members[number].seq for number in living],
            population.log_weights[living] - total,
            population.log_normaliser,
            {"resamplings": len(population.history), **population.counts},
        )

    def _targets(self) -> tuple[TargetDistribution, TargetDistribution]:
        """What texts grow towards, and what moves go to."""
        if self.strict:
            only = TargetDistribution(
                self.power if self.target == "powered" else None, self.lookahead, self.rollout_temperature
            )
            return only, only
        return TargetDistribution(), TargetDistribution(self.power, self.lookahead or 2, self.rollout_temperature)
