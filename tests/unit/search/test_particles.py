"""Weighted particles that are toy texts against enumerated posteriors, and weights that are wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from decodery.search.particles import log_mean, systematic
from decodery.search.population import Population, TargetDistribution, TokenBlock, move_log_ratio
from decodery.search.smc import SMC
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from toy_world import END, LENGTH, MODEL, PROMPT, TARGETS, Psi, log_psi, population, search


def law(text: Sequence[int]) -> np.ndarray:
    return MODEL.logits([*PROMPT, *text]).softmax(-1).numpy()


def texts() -> list[tuple[int, ...]]:
    """All texts that end within LENGTH tokens, the end included."""
    return [(*body, END) for size in range(LENGTH) for body in itertools.product((1, 2), repeat=size)]


def exact(power: float, psi: Callable[[Sequence[int]], float]) -> dict[tuple[int, ...], float]:
    """p(text) ** power * psi(text) of all texts, not normalised."""
    found = {}
    for text in texts():
        p = math.prod(law(text[:at])[token] for at, token in enumerate(text))
        found[text] = p**power * math.exp(psi(text[:-1]))
    return found


def distance(found: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> float:
    """Total variation; `wanted` need not be normalised."""
    total = sum(wanted.values())
    assert set(found) <= set(wanted)
    return 0.5 * sum(abs(found.get(text, 0.0) - mass / total) for text, mass in wanted.items())


def weighted_texts(found: Population) -> dict[tuple[int, ...], float]:
    weights = np.exp(found.log_weights - log_mean(found.log_weights)) / len(found.members)
    masses: dict[tuple[int, ...], float] = {}
    for particle, weight in zip(found.members, weights, strict=True):
        masses[particle.text] = masses.get(particle.text, 0.0) + float(weight)
    return masses


@pytest.mark.parametrize("name", list(TARGETS)[:4])
def test_weighted_particles_are_the_enumerated_posterior(name: str) -> None:
    target, block, moves, changes = TARGETS[name]
    found = population(5000, target, block, moves, **changes)
    wanted = exact(target.power or 1.0, log_psi)
    assert distance(weighted_texts(found), wanted) < 0.02
    assert abs(found.log_normaliser - math.log(sum(wanted.values()))) < 0.05
    assert not moves or found.counts["moved"] > 1000


class Restless(Population):
    """Wrong on purpose: resampled particles keep their weights."""

    def resample(self) -> list[int]:
        chosen = systematic(self.weights, self.uniform())
        self.members = [self.proposal.fork(self.members[each]) for each in chosen]
        self.log_weights = self.log_weights[chosen]
        return chosen


class Fresh(Population):
    """Wrong on purpose: the value of a beginning is estimated again where it is divided by."""

    def _advance(self) -> ForwardCoroutine[None]:
        active = [self.members[number] for number in self._open()]
        values, _ = yield from self._values(active, self.target, None)
        for particle, value in zip(active, values, strict=True):
            particle.value = value if self._length else 0.0
        yield from super()._advance()


class Doubled(Population):
    """Wrong on purpose: the potential of a beginning counts beside that of the whole."""

    def _advance(self) -> ForwardCoroutine[None]:
        for number in self._open():
            self.members[number].value = 0.0
        yield from super()._advance()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Restless, "prefix-only"), (Fresh, "lookahead"), (Doubled, "prefix-only")],
    ids=lambda each: str(each),
)
def test_wrong_weights_are_caught(kind: type[Population], name: str) -> None:
    target, block, moves, changes = TARGETS[name]
    found = population(2000, target, block, moves, kind=kind, **changes | {"threshold": 1.0})
    wanted = exact(target.power or 1.0, log_psi)
    far = abs(found.log_normaliser - math.log(sum(wanted.values())))
    assert distance(weighted_texts(found), wanted) > 0.06 or far > 0.15


class Scheduled(Population):
    """Moves after every block, to the last that any text may reach, whatever becomes of the particles."""

    def run(self) -> ForwardCoroutine[None]:
        self.members = yield from as_coroutine(self.proposal.start(self._count))
        self.log_weights = np.zeros(self._count)
        for _ in range(math.ceil(LENGTH / self.block)):
            yield from self._advance()
            self.resample()
            for _ in range(self.moves):
                yield from self.move()


def uneven(text: Sequence[int]) -> float:
    return 1.4 * len(text) - 2.7 * sum(token == 2 for token in text)


def deviation(runs: int, count: int, target: TargetDistribution, moves: int, **changes) -> float:
    """How many standard errors the mean of the normaliser lies above the enumerated mass."""
    mass = sum(exact(target.power or 1.0, uneven).values())
    found = [population(count, target, 1, moves, uneven, seed, **changes).log_normaliser for seed in range(runs)]
    ratios = np.exp(found) / mass
    return float((ratios.mean() - 1) / ratios.std(ddof=1) * math.sqrt(runs))


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        (TargetDistribution(2.0), {"threshold": 0.8}),
        (TargetDistribution(2.0), {"threshold": 1.0}),
        (TargetDistribution(rollouts=1, temperature=1.0), {"threshold": 0.8}),
        (TargetDistribution(2.0), {"moves": 2, "kind": Scheduled}),
    ],
    ids=["resampled", "always resampled", "lookahead", "moves on a schedule"],
)
def test_the_mean_of_the_normaliser_is_the_mass(target: TargetDistribution, changes: dict) -> None:
    assert abs(deviation(400, 2, target, **{"moves": 0} | changes)) < 4


def test_the_mean_of_the_normaliser_is_another_with_moves_and_with_wrong_weights() -> None:
    # As it is documented: moves that are made in response to the particles.
    assert deviation(1000, 2, TargetDistribution(2.0), 2, threshold=0.8) > 4
    assert deviation(400, 2, TargetDistribution(2.0), 0, threshold=1.0, kind=Restless) < -4


def test_neighbouring_seeds_have_nothing_in_common() -> None:
    found = [search(SMC(8, potential=Psi(), moves=0, threshold=0.0), seed=seed) for seed in range(60)]
    seeds = [{seq.request.seed for seq in each.sequences} for each in found]
    assert len(set().union(*seeds)) == sum(map(len, seeds)) == 480
    masses = np.exp([each.log_normaliser for each in found])
    assert abs(np.corrcoef(masses[:-1], masses[1:])[0, 1]) < 0.45


def blocks_of(text: tuple[int, ...], size: int) -> list[TokenBlock]:
    """The blocks of a text drawn from the model, its forced end included."""
    found: list[TokenBlock] = []
    for at, token in enumerate(text):
        if at % size == 0:
            found.append(TokenBlock())
        p = math.log(law(text[:at])[token])
        found[-1].mass += p if at == LENGTH - 1 else 0.0
        found[-1].request, found[-1].model, found[-1].drawn = (
            found[-1].request + p, found[-1].model + p, found[-1].drawn + p,
        )  # fmt: skip
    return found


def imbalance(target: TargetDistribution, size: int, counted: bool = True) -> float:
    """The largest |Pi(x) K(x, y) - Pi(y) K(y, x)| of the move over all pairs of texts, Pi summing to 1."""
    wanted = exact(target.power or 1.0, log_psi)
    total = sum(wanted.values())
    worst = 0.0
    for x, y in itertools.combinations(texts(), 2):
        flow = []
        for old, new in ((x, y), (y, x)):
            ours, theirs = blocks_of(old, size), blocks_of(new, size)
            rate = 0.0
            for cut in range(len(ours)):
                if old[: cut * size] != new[: cut * size] or cut >= len(theirs):
                    continue
                drawn = math.exp(sum(block.drawn for block in theirs[cut:]))
                if len(new) == LENGTH:
                    # The forced end is certain.
                    drawn /= law(new[:-1])[END]
                ratio = move_log_ratio(target, ours, log_psi(old[:-1]), theirs, log_psi(new[:-1]), cut)
                if not counted:
                    ratio += math.log(len(theirs)) - math.log(len(ours))
                rate += drawn * min(1.0, math.exp(ratio)) / len(ours)
            flow.append(wanted[old] / total * rate)
        worst = max(worst, abs(flow[0] - flow[1]))
    return worst


def test_moves_keep_detailed_balance() -> None:
    for target, size in itertools.product((TargetDistribution(), TargetDistribution(3.0)), (1, 2)):
        assert imbalance(target, size) < 1e-12
        assert imbalance(target, size, counted=False) > 1e-4
