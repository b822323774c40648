"""What searches have in common that filter particles over steps."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pool import require_count
from .steps import Growth, Node, StepSearch
from .sweeps import Potential, Resample, Sweep, Weighing, log_potential
from .weights import multinomial, systematic, uniforms

Resampling = Literal["multinomial", "systematic"]

_EARLY = 3
"""Texts collapse early where only one is kept within the first of so many parts of the steps."""
_TELLING = 4
"""Among fewer texts one is often drawn alone, whatever they weigh."""


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

    def weighing(self, temperature: float) -> Weighing:
        return Weighing(temperature, self.accumulation, self.ended)

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
        sweeps = yield from self.explore(growth, resampler(self.draws, growth.root.seq.seed))
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
        """Let these sweeps come to their ends, and note what became of them.

        Args:
            alone: Whether all results are theirs.
        """
        active = list(sweeps)
        while active:
            yield from self.step(growth, active)
            active = [sweep for sweep in active if sweep.open]
            for sweep in active:
                sweep.resample()
            if alone:
                growth.settle(line.last for sweep in sweeps for line in sweep.lines)
        for sweep in sweeps:
            note(sweep)

    def _elected(self, growth: Growth, sweeps: Ordered[Sweep[Node]]) -> ForwardCoroutine[list[Sequence]]:
        """Different texts of these sweeps as results; in a vote they count what all particles with them weigh."""
        nodes: dict[tuple[int, ...], Node] = {}
        votes: dict[tuple[int, ...], float] = {}
        for sweep in sweeps:
            for line, weight in zip(sweep.lines, sweep.weights, strict=True):
                if weight > 0:
                    tokens = tuple(line.last.seq.tokens)
                    nodes.setdefault(tokens, line.last)
                    votes[tokens] = votes.get(tokens, 0.0) + float(weight)
        return (yield from growth.finish(list(nodes.values()), list(votes.values())))


def note(sweep: Sweep[Node]) -> None:
    """Enter in the ledger how a sweep has kept its texts apart, as sums over its resamplings.

    Warn if it has not.
    """
    count("resamplings", len(sweep.ancestors))
    count("effective", math.fsum(sweep.effective))
    count("ancestors", sum(sweep.ancestors))
    early = sweep.ancestors[: sweep.steps // _EARLY]
    if 1 in early and len(sweep.lines) >= _TELLING:
        count("collapsed")
        warnings.warn(
            f"all {len(sweep.lines)} texts come from one after {early.index(1) + 1} of {sweep.steps} steps: what that "
            "one got wrong is in all of them; raise reward_temperature, take more texts, or use "
            "entropic-particle-filter",
            stacklevel=2,
        )


def resampler(how: Resampling, seed: int) -> Resample:
    """How texts are drawn by weight, each time with fresh numbers."""
    uniform = uniforms(seed)

    def drawn(weights: np.ndarray, size: int) -> list[int]:
        if how == "systematic":
            return systematic(weights, uniform())
        return multinomial(weights, [uniform() for _ in range(size)])

    return drawn


def require_temperature(value: float) -> None:
    """Raise SettingsError for what no potential can be raised to the inverse of."""
    require_number("reward_temperature", value, above=0.0)


def require_resampling(name: str, value: str) -> None:
    """Raise SettingsError for an unknown way."""
    if value not in ("multinomial", "systematic"):
        raise SettingsError(f"{name} resamples multinomial or systematic, not {value!r}")


def require_width(name: str, particles: int, sweeps: int) -> None:
    """Raise SettingsError where a sweep would have no text beside its reference."""
    if particles < 2 and sweeps > 1:
        raise SettingsError(f"{name} needs at least 2 particles: beside the reference nothing would be written")
