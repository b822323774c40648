"""Sequential Monte Carlo against enumerated posteriors: the algorithm over a toy world, the search over tiny models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import decodery as dc
from decodery.core.ask import Asking, drive, settled
from decodery.core.noise import PARTICLE, TOKEN, draw, mix
from decodery.decode.engine import Engine
from decodery.decode.request import Request
from decodery.errors import ConstraintError, SettingsError
from decodery.sample import Sampler
from decodery.sample.constraint import Constrained, Constraint
from decodery.search.particles import (
    Block,
    Particle,
    Population,
    Target,
    effective_size,
    log_mean,
    move_log_ratio,
    systematic,
)
from decodery.search.potential import Potential, TextPotential
from decodery.search.smc import SMC, Posterior
from decodery.testing import TableModel, decode

END, LENGTH = 0, 5


class Chain(TableModel):
    """Three tokens, of which 0 ends a text, with few likely texts: a small total variation is then seen early."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(((1, 0, 0), (0.1, 0.05, 0.85), (0.55, 0.43, 0.02))[tokens[-1]], dtype=torch.float64).log()


MODEL = Chain(3)
PROMPT = [1]
PLAIN = Sampler.from_settings(temperature=1.0)


def log_psi(text: Sequence[int]) -> float:
    """A potential of whole texts: it likes 2, and an end soon."""
    return 1.2 * sum(token == 2 for token in text) - 0.8 * len(text)


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


@dataclass
class Toy(Particle):
    """A text of the table model, without caches and passes."""

    text: tuple[int, ...] = ()
    seed: int = 0

    @property
    def finished(self) -> bool:
        return self.text[-1:] == (END,)


class ToyWorld:
    """What `Walk` does to sequences, for texts as tuples: the same draws from the same noise."""

    def __init__(self, block: int, psi: Callable[[Sequence[int]], float] | None, seed: int = 0) -> None:
        self.block, self.psi, self.seed = block, psi, seed
        self.streams = itertools.count()
        self.laws: dict[tuple[tuple[int, ...], float], tuple[list[float], list[float], list[float]]] = {}

    def start(self, count: int) -> list[Toy]:
        return [Toy(seed=mix(self.seed, PARTICLE, next(self.streams))) for _ in range(count)]

    def fork(self, particle: Toy) -> Toy:
        blocks = [Block(each.mass, each.request, each.model, each.drawn) for each in particle.blocks]
        return Toy(
            blocks,
            particle.value,
            particle.log_weight,
            particle.text,
            seed=mix(self.seed, PARTICLE, next(self.streams)),
        )

    def cut(self, particle: Toy, block: int) -> Toy:
        twin = self.fork(particle)
        twin.text, twin.blocks = twin.text[: block * self.block], twin.blocks[:block]
        return twin

    def potentials(self, particles: Sequence[Toy]) -> list[float]:
        if self.psi is None:
            return [0.0] * len(particles)
        return [self.psi(each.text[:-1] if each.finished else each.text) for each in particles]

    def extend(self, particles: Sequence[Toy], length: int | None, temperature: float = 1.0) -> None:
        # In the order in which passes would be shared, so that nothing depends on it.
        while active := [each for each in particles if not each.finished and len(each.text) < (length or LENGTH)]:
            for each in active:
                self._step(each, temperature)

    def _step(self, each: Toy, temperature: float) -> None:
        if len(each.text) % self.block == 0:
            each.blocks.append(Block())
        row, request, drawn = self._law(each.text, temperature)
        block, position = each.blocks[-1], len(each.text)
        if position == LENGTH - 1:
            token, block.mass = END, block.mass + drawn[END]
        else:
            noise = [-math.log(-math.log(draw(each.seed, position, token, stream=TOKEN))) for token in range(3)]
            token = max(range(3), key=lambda token: row[token] + noise[token])
        block.request += request[token]
        block.model += request[token]
        block.drawn += drawn[token]
        each.text = (*each.text, token)

    def _law(self, text: tuple[int, ...], temperature: float) -> tuple[list[float], list[float], list[float]]:
        key = (text, temperature)
        if key not in self.laws:
            logits = MODEL.logits([*PROMPT, *text]).float()[None]
            tempered = logits if temperature == 1 else logits / temperature
            request, drawn = (each.double().log_softmax(-1)[0].tolist() for each in (logits, tempered))
            self.laws[key] = (tempered[0].tolist(), request, drawn)
        return self.laws[key]


def population(count: int, target: Target, block: int, moves: int = 0, psi=log_psi, seed: int = 0, **changes):
    numbers = itertools.count(1)
    found = changes.pop("kind", Population)(
        ToyWorld(block, psi, seed),
        count,
        **{
            **{"target": target, "moving": target, "block": block, "threshold": 0.5, "moves": moves},
            **{"uniform": lambda: draw(seed, next(numbers), stream=9)},
            **changes,
        },
    )
    drive(found.run())
    return found


def weighted_texts(found: Population) -> dict[tuple[int, ...], float]:
    weights = np.exp(found.log_weights - log_mean(found.log_weights)) / len(found.particles)
    masses: dict[tuple[int, ...], float] = {}
    for particle, weight in zip(found.particles, weights, strict=True):
        masses[particle.text] = masses.get(particle.text, 0.0) + float(weight)
    return masses


TARGETS = {
    "prefix-only": (Target(), 1, 0, {}),
    "powered": (Target(2.0), 2, 0, {}),
    "lookahead": (Target(rollouts=2, temperature=1.0), 2, 0, {"threshold": 0.9}),
    "moves": (Target(), 2, 1, {"threshold": 1.0}),
    "powered, lookahead and moves": (Target(2.0, 2, 0.6), 2, 1, {"threshold": 1.0}),
}


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

    def _resample(self) -> None:
        weights = np.exp(self.log_weights - log_mean(self.log_weights)) / len(self.particles)
        self.particles = [self.world.fork(self.particles[each]) for each in systematic(weights, self.uniform())]


class Fresh(Population):
    """Wrong on purpose: the value of a beginning is estimated again where it is divided by."""

    def _advance(self) -> Asking[None]:
        active = self._open()
        values, _ = yield from self._values(active, self.target, None)
        for particle, value in zip(active, values, strict=True):
            particle.value = value if self._length else 0.0
        yield from super()._advance()


class Doubled(Population):
    """Wrong on purpose: the potential of a beginning counts beside that of the whole."""

    def _advance(self) -> Asking[None]:
        for particle in self._open():
            particle.value = 0.0
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

    def run(self) -> Asking[None]:
        self.particles = yield from settled(self.world.start(self._count))
        for _ in range(math.ceil(LENGTH / self.block)):
            yield from self._advance()
            self._resample()
            for _ in range(self.moves):
                yield from self._move()


def uneven(text: Sequence[int]) -> float:
    return 1.4 * len(text) - 2.7 * sum(token == 2 for token in text)


def deviation(runs: int, count: int, target: Target, moves: int, **changes) -> float:
    """How many standard errors the mean of the normaliser lies above the enumerated mass."""
    mass = sum(exact(target.power or 1.0, uneven).values())
    found = [population(count, target, 1, moves, uneven, seed, **changes).log_normaliser for seed in range(runs)]
    ratios = np.exp(found) / mass
    return float((ratios.mean() - 1) / ratios.std(ddof=1) * math.sqrt(runs))


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        (Target(2.0), {"threshold": 0.8}),
        (Target(2.0), {"threshold": 1.0}),
        (Target(rollouts=1, temperature=1.0), {"threshold": 0.8}),
        (Target(2.0), {"moves": 2, "kind": Scheduled}),
    ],
    ids=["resampled", "always resampled", "lookahead", "moves on a schedule"],
)
def test_the_mean_of_the_normaliser_is_the_mass(target: Target, changes: dict) -> None:
    assert abs(deviation(700, 2, target, **{"moves": 0} | changes)) < 4


def test_the_mean_of_the_normaliser_is_another_with_moves_and_with_wrong_weights() -> None:
    # As it is documented: moves that are made in response to the particles.
    assert deviation(1000, 2, Target(2.0), 2, threshold=0.8) > 4
    assert deviation(700, 2, Target(2.0), 0, threshold=1.0, kind=Restless) < -4


def test_neighbouring_seeds_have_nothing_in_common() -> None:
    found = [search(SMC(8, potential=_Psi(), moves=0, threshold=0.0), seed=seed) for seed in range(60)]
    seeds = [{seq.seed for seq in each.sequences} for each in found]
    assert len(set().union(*seeds)) == sum(map(len, seeds)) == 480
    masses = np.exp([each.log_normaliser for each in found])
    assert abs(np.corrcoef(masses[:-1], masses[1:])[0, 1]) < 0.45


def blocks_of(text: tuple[int, ...], size: int) -> list[Block]:
    """The blocks of a text drawn from the model, its forced end included."""
    found: list[Block] = []
    for at, token in enumerate(text):
        if at % size == 0:
            found.append(Block())
        p = math.log(law(text[:at])[token])
        found[-1].mass += p if at == LENGTH - 1 else 0.0
        found[-1].request, found[-1].model, found[-1].drawn = (
            found[-1].request + p, found[-1].model + p, found[-1].drawn + p,
        )  # fmt: skip
    return found


def imbalance(target: Target, size: int, counted: bool = True) -> float:
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
    for target, size in itertools.product((Target(), Target(3.0)), (1, 2)):
        assert imbalance(target, size) < 1e-12
        assert imbalance(target, size, counted=False) > 1e-4


class _Psi(Potential):
    def prefix(self, outputs: Sequence[Sequence[int]]) -> list[float]:
        return [log_psi(output) for output in outputs]

    def complete(self, outputs: Sequence[Sequence[int]]) -> list[float]:
        return [log_psi(output) for output in outputs]


def search(smc: SMC, *, seed: int = 0, sampler: Sampler = PLAIN, model=MODEL, length: int = LENGTH) -> Posterior:
    request = Request(PROMPT, sampler=sampler, seed=seed, max_new_tokens=length, eos_ids=(END,))
    return smc.posterior(Engine(model), request)


@pytest.mark.parametrize("name", TARGETS)
def test_the_search_does_what_the_toy_does(name: str) -> None:
    target, block, moves, changes = TARGETS[name]
    toy = population(30, target, block, moves, seed=6, **changes)
    smc = SMC(
        *(30, block, "tempered" if target.power is None else "powered", target.power or 4.0, _Psi()),
        lookahead=target.rollouts,
        rollout_temperature=target.temperature,
        moves=moves,
        **changes,
    )
    found = search(smc, seed=6)
    assert [tuple(seq.generated) for seq in found.sequences] == [particle.text for particle in toy.particles]
    assert np.allclose(found.log_weights, toy.log_weights - log_mean(toy.log_weights) - math.log(30), atol=1e-6)
    assert math.isclose(found.log_normaliser, toy.log_normaliser, abs_tol=1e-6)


def test_without_weights_particles_are_samples() -> None:
    settings = {"max_new_tokens": 9, "sampler": PLAIN}
    found = SMC(12, 4, moves=2).posterior(Engine(MODEL), Request(PROMPT, **settings, seed=3))
    plain = decode(MODEL, [PROMPT], seeds=[mix(3, PARTICLE, number) for number in range(12)], **settings)
    assert [seq.generated for seq in found.sequences] == [seq.generated for seq in plain]
    assert np.allclose(found.log_weights, -math.log(12)) and found.log_normaliser == 0


class Fork(Constraint):
    """a or b, then c, then the end. ids: 0 the end, 1 a, 2 b, 3 c, 4 what is never allowed."""

    def init(self, prompt: Sequence[int]) -> int:
        return 0

    def allowed(self, state: int) -> np.ndarray:
        return np.isin(np.arange(5), ((1, 2), (3,), (0,))[min(state, 2)])

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def is_complete(self, state: int) -> bool:
        return state >= 2


class Deceptive(TableModel):
    """a is nine times as likely as b, and behind it c is next to impossible."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        rows = {1: (0, 0, 0, 0.001, 0.999), 2: (0, 0, 0, 1, 0), 3: (1, 0, 0, 0, 0), 4: (0, 0.9, 0.1, 0, 0)}
        return torch.tensor(rows[tokens[-1]], dtype=torch.float64).log()


FORKED = {"sampler": Sampler((Constrained(Fork()), *PLAIN.warps)), "eos_ids": (END,)}


def test_what_is_hard_to_complete_loses_its_weight() -> None:
    request = Request([4], **FORKED, max_new_tokens=8)
    found = SMC(2000).posterior(Engine(Deceptive(5)), request)
    weights = np.exp(found.log_weights)
    share = sum(weight for seq, weight in zip(found.sequences, weights, strict=True) if seq.generated[0] == 1)
    assert abs(share - 0.0009 / 0.1009) < 0.005
    assert abs(math.exp(found.log_normaliser) - 0.1009) < 0.03
    # Wrong on purpose: a mask renormalises, and begins with a nine times out of ten.
    masked = decode(Deceptive(5), [[4]], seeds=range(100), max_new_tokens=8, **FORKED)
    assert sum(seq.generated[0] == 1 for seq in masked) > 80


def test_the_answer_is_ranked_by_the_weight_that_was_asked_for() -> None:
    request = Request([4], **FORKED, max_new_tokens=3)
    engine = Engine(Deceptive(5))
    majority = SMC(40).run(engine, request)
    assert [seq.generated[0] for seq in majority] == [2, 1][: len(majority)]
    assert math.isclose(sum(math.exp(seq.score) for seq in majority), 1.0)
    heaviest = SMC(40, answer="heaviest").run(engine, request)
    assert heaviest[0].score < majority[0].score and math.exp(heaviest[0].score) >= 1 / 40
    drawn = [SMC(40, answer="draw").run(engine, replace(request, seed=seed)) for seed in range(10)]
    assert all(len(each) == 1 for each in drawn) and sum(each[0].generated[0] == 2 for each in drawn) > 6
    counts = majority[0].trace.counts
    assert counts["checks"] > counts["rejections"] > 0 and counts["resamplings"] >= 1


def test_a_population_that_dies_starts_again_and_then_gives_up() -> None:
    # One particle begins with a nine times out of ten, and then cannot go on.
    class Harsh(Deceptive):
        def logits(self, tokens: Sequence[int]) -> torch.Tensor:
            if tokens[-1] == 1:
                return torch.tensor([0.0, 0, 0, 0, 1], dtype=torch.float64).log()
            return super().logits(tokens)

    restarts = 0
    for seed in range(6):
        request = Request([4], **FORKED, max_new_tokens=3, seed=seed)
        try:
            found = SMC(1).posterior(Engine(Harsh(5)), request)
        except ConstraintError as error:
            assert "none of 1 particles lived to its end in 9 tries" in str(error)
        else:
            assert found.sequences[0].generated == [2, 3, END]
            restarts += found.counts["restarts"]
    assert restarts


def test_the_shared_pieces() -> None:
    weights = np.array([0.05, 0.0, 0.6, 0.35])
    draws = np.array([np.bincount(systematic(weights, (each + 0.5) / 1000), minlength=4) for each in range(1000)])
    assert np.abs(draws.mean(axis=0) - 4 * weights).max() < 0.01
    assert (np.abs(draws - 4 * weights) < 1).all() and not draws[:, 1].any()
    assert systematic(np.array([0.5, 0.5 - 1e-16, 0.0]), 1 - 1e-16) == [0, 1, 1]
    assert effective_size(np.log([1.0, 1.0, 1.0])) == pytest.approx(3)
    assert effective_size(np.array([0.0, -math.inf])) == 1 and effective_size(np.array([-math.inf])) == 0
    assert log_mean(np.array([-1000.0, -math.inf])) == pytest.approx(-1000 - math.log(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"particles": 0}, "particles of at least 1"),
        ({"max_rejects": 1}, "max_rejects of at least 2"),
        ({"power": 0.0}, "power must be"),
        ({"target": "cold"}, "the target of smc is"),
        ({"potential": lambda text: 1.0}, "must be a Potential"),
        ({"strict": False, "target": "powered"}, "leave target out"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        SMC(**settings)


def test_the_published_mixture_and_errors_of_potentials() -> None:
    mixed = search(SMC(12, 2, potential=_Psi(), strict=False, moves=1, threshold=1.0))
    assert len(mixed.sequences) == 12 and mixed.counts["moves"] > 0
    with pytest.raises(SettingsError, match="give a temperature"):
        search(SMC(2), sampler=Sampler.from_settings())
    with pytest.raises(SettingsError, match="reads text"):
        search(SMC(2, potential=TextPotential(len)))
    with pytest.raises(SettingsError, match="a finite number or -inf"):
        search(SMC(2, potential=TextPotential(lambda text: math.nan, decode=str)))


def test_texts_of_a_real_model_follow_constraint_and_potential(smollm2_int8: dc.LM) -> None:
    digits = dc.constrain.Checker(lambda text: set(text) <= set("37") and len(text) < 4, lambda text: len(text) == 3)
    potential = TextPotential(lambda text: 8.0 * text.count("7"), lambda text: 8.0 * text.count("7"))
    settings = {"temperature": 1.0, "max_new_tokens": 5, "constraint": digits}
    found = smollm2_int8.search("A number of three digits:", SMC(6, 1, potential=potential, moves=0), **settings)
    assert all(len(out.text) == 3 and set(out.text) <= set("37") and out.finish_reason == "stop" for out in found)
    assert "7" in found[0].text and found[0].trace.counts["potentials"] > 8
    assert math.isclose(sum(math.exp(out.score) for out in found), 1.0)
