"""Particles over steps: their laws by enumeration of all that may be drawn, beside rules that are wrong."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import PARTICLE, draw, gumbel, mix, nth_seed
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.a_star import AStar
from decodery.search.entropic_particle_filter import EntropicParticleFilter, annealed
from decodery.search.parallel_tempering import ParallelTempering, swap_log_ratio
from decodery.search.particle_filter import ParticleFilter
from decodery.search.particle_gibbs import ParticleGibbs
from decodery.search.particle_search import ParticleSearch
from decodery.search.particles import (
    Resampled,
    effective_size,
    multinomial,
    normalised,
    resampler,
    systematic,
    uniforms,
)
from decodery.search.step_nodes import Node
from decodery.search.sweep import Sweep, Trajectory, log_potential
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel, decode

Text = tuple[int, ...]
T = TypeVar("T")


class Table(Scorer):
    """A reward in (0, 1) for every text."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([reward(tuple(output)) for output in candidates.outputs], dtype=torch.float64)


@cache
def reward(text: Text, seed: int = 5) -> float:
    return 0.05 + 0.9 * draw(mix(seed, *text), 0)


@cache
def law(text: Text, vocab: int = 2) -> np.ndarray:
    weights = np.array([-math.log(draw(mix(7, *text), token)) for token in range(vocab)])
    return weights / weights.sum()


class Toy:
    """What a search uses of `Growth`, over texts of a random table. sizes: how many tokens there are at each step.

    early: whether token 0 ends a text.
    """

    def __init__(self, choose: Callable[[np.ndarray], int], sizes: Sequence[int], early: bool) -> None:
        self.choose, self.sizes, self.early = choose, sizes, early
        self.root = Node(SimpleNamespace(tokens=(), finished=False), 0)

    def extend(self, parents: Sequence[Node]) -> Iterator[Any]:
        return [self.child(parent, self.choose(self.chances(parent.seq.tokens))) for parent in parents]
        yield

    def judge(self, nodes: Sequence[Node]) -> Iterator[Any]:
        return list(nodes)
        yield

    def settle(self, nodes: Any) -> None:
        """Nobody waits for the text."""

    def chances(self, text: Text) -> np.ndarray:
        return law(text, self.sizes[len(text)])

    def child(self, parent: Node, token: int) -> Node:
        text = (*parent.seq.tokens, token)
        finished = len(text) == len(self.sizes) or (self.early and token == 0)
        seq = SimpleNamespace(tokens=text, finished=finished)
        return Node(seq, 0, scores=(*parent.scores, reward(text)), depth=parent.depth + 1, judged=True)

    def lines(self, search: ParticleSearch) -> dict[Text, tuple[float, Trajectory]]:
        """All whole texts with their probability."""
        found, open_ = {}, [(1.0, Trajectory((self.root,)))]
        while open_:
            chance, line = open_.pop()
            if line.last.finished:
                found[line.last.seq.tokens] = chance, line
                continue
            for token, p in enumerate(self.chances(line.last.seq.tokens)):
                child = self.child(line.last, token)
                open_.append((chance * p, line.grown(child, search.log_potential(child))))
        return found


class Choices:
    """Draws that are made on purpose: along `path`, then the first that is possible. others: paths not taken."""

    def __init__(self, path: Text) -> None:
        self.path, self.taken, self.chance = path, (), 1.0
        self.others: list[Text] = []

    def __call__(self, probabilities: np.ndarray) -> int:
        if len(self.taken) < len(self.path):
            number = self.path[len(self.taken)]
        else:
            number, *others = np.flatnonzero(probabilities).tolist()
            self.others += [(*self.taken, other) for other in others]
        self.taken, self.chance = (*self.taken, number), self.chance * float(probabilities[number])
        return number


def all_runs(run: Callable[[Choices], T]) -> Iterator[tuple[float, T]]:
    """Results of a function that draws, whatever it may draw, with their probabilities."""
    paths: list[Text] = [()]
    while paths:
        choices = Choices(paths.pop())
        found = run(choices)
        paths += choices.others
        yield choices.chance, found


def resampling(how: str, choose: Callable[[np.ndarray], int]) -> Callable[[np.ndarray, int], list[int]]:
    def drawn(weights: np.ndarray, size: int) -> list[int]:
        if how == "multinomial" or size < len(weights):
            return [choose(weights) for _ in range(size)]
        # Between these numbers the copies are the same.
        edges = np.unique([0.0, 1.0, *(size * np.cumsum(weights)) % 1])
        part = choose(np.diff(edges))
        return systematic(weights, (edges[part] + edges[part + 1]) / 2)

    return drawn


def explored(search: ParticleSearch, toy: Toy, how: str = "multinomial") -> list[Sweep]:
    return run_sync(search.explore(toy, resampling(how, toy.choose)))


SHORT, LONG = (2, 2), (2, 2, 2)


def mass(search: ParticleSearch, sizes: Sequence[int], early: bool) -> dict[Text, float]:
    """What the search aims at: p(text) times its potentials, not normalised."""
    temperature = getattr(search, "reward_temperature", 1.0)
    total = search.weighting(temperature).log_total
    lines = Toy(lambda chances: 0, sizes, early).lines(search)
    return {text: p * math.exp(total(line) / temperature) for text, (p, line) in lines.items()}


def bias(search: ParticleSearch, sizes: Sequence[int], early: bool = False, how: str = "multinomial") -> float:
    """The largest relative difference between what texts are estimated to weigh, on average, and what they weigh."""
    found: dict[Text, float] = {}
    total = 0.0
    for chance, (sweep,) in all_runs(lambda choose: explored(search, Toy(choose, sizes, early), how)):
        total += chance
        for line, weight in zip(sweep.members, sweep.weights, strict=True):
            text = line.last.seq.tokens
            found[text] = found.get(text, 0.0) + chance * math.exp(sweep.log_normaliser) * weight
    assert math.isclose(total, 1.0)
    wanted = mass(search, sizes, early)
    assert set(found) == set(wanted)
    return max(abs(found[text] / wanted[text] - 1) for text in wanted)


@pytest.mark.parametrize("how", ["multinomial", "systematic"])
def test_weights_and_the_normaliser_have_no_bias(how: str) -> None:
    for settings, sizes, early in (
        ({}, LONG if how == "systematic" else (1, 2, 2), False),
        ({"potential": "prob", "reward_temperature": 0.5}, SHORT, False),
        ({"accumulation": "telescoping"}, (1, 2, 2), False),
        ({"potential": "prob", "ended": "freeze"}, SHORT, True),
        ({"accumulation": "telescoping", "potential": "prob"}, SHORT, True),
    ):
        assert bias(ParticleFilter(Table(), particles=2, **settings), sizes, early, how) < 1e-10
    # As it is documented: what has ended counts again in every round.
    assert bias(ParticleFilter(Table(), particles=2), SHORT, early=True, how=how) > 0.02


class Rolled(Sweep):
    """Wrong on purpose: texts are drawn by the weights of their neighbours."""

    def resample(self, *arguments: Any, **named: Any) -> list[int]:
        self.log_weights = np.roll(self.log_weights, 1)
        return super().resample(*arguments, **named)


def test_wrong_weights_have_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodery.search.particle_filter.Sweep", Rolled)
    assert bias(ParticleFilter(Table(), particles=2), SHORT) > 0.02


def test_lookahead_has_no_bias() -> None:
    for settings in ({"lookahead": "fresh"}, {"lookahead": "reuse", "double_count": False}):
        once = EntropicParticleFilter(Table(), particles=2, least=0.0, ended="freeze", **settings)
        assert bias(once, (1, 2, 1), how="systematic") < 1e-10
        assert bias(once, SHORT, early=True) < 1e-10
    # As it is documented: these change the target.
    for settings in ({"lookahead": "reuse", "least": 0.0}, {"least": 1.0, "early": 1.0}):
        assert bias(EntropicParticleFilter(Table(), particles=2, **settings), SHORT, how="systematic") > 0.02


class Ahead(Sweep):
    """Wrong on purpose: the reference is weighed by the step after the one that is compared."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self._reference is not None:
            potentials = self._reference.log_potentials
            self._reference = Trajectory(self._reference.states, (*potentials[1:], potentials[-1]))


def moved(search: ParticleGibbs, sizes: Sequence[int], early: bool, kind: type[Sweep] = Sweep) -> float:
    """How far one conditional sweep moves the law it should leave as it is, in total variation."""
    wanted = mass(search, sizes, early)
    total, after = sum(wanted.values()), dict.fromkeys(wanted, 0.0)
    lines = Toy(lambda chances: 0, sizes, early).lines(search)
    weighting = search.weighting(search.reward_temperature)

    def swept(choose: Callable[[np.ndarray], int], reference: Trajectory) -> Text:
        toy = Toy(choose, sizes, early)
        sweep = kind(toy.root, search.particles, weighting, resampling("multinomial", choose), reference)
        run_sync(search.run_on(toy, [sweep]))
        return sweep.drawn().last.seq.tokens

    for text, (_, line) in lines.items():
        for chance, found in all_runs(lambda choose, line=line: swept(choose, line)):
            after[found] += wanted[text] / total * chance
    return 0.5 * sum(abs(after[text] - wanted[text] / total) for text in wanted)


def test_a_sweep_of_particle_gibbs_leaves_the_law_as_it_is() -> None:
    pair = ParticleGibbs(Table(), particles=2)
    assert moved(pair, LONG, False) < 1e-12
    assert moved(ParticleGibbs(Table(), particles=3, potential="prob"), (1, 2), False) < 1e-12
    assert moved(ParticleGibbs(Table(), particles=2, ended="freeze", reward_temperature=2.0), LONG, True) < 1e-12
    assert moved(ParticleGibbs(Table(), particles=2, accumulation="telescoping"), SHORT, True) < 1e-12
    # As it is documented: where texts end apart and compete on there is no such law.
    assert moved(pair, SHORT, True) > 1e-3
    assert moved(pair, LONG, False, Ahead) > 1e-3


def test_exchanges_keep_detailed_balance() -> None:
    search = ParallelTempering(Table(), particles=2, temperatures=(0.5, 2.0), accumulation="telescoping")
    lines = Toy(lambda chances: 0, SHORT, False).lines(search)

    def pi(text: Text, temperature: float) -> float:
        p, line = lines[text]
        return p * math.exp(line.log_potentials[-1] / temperature)

    for x, y in itertools.combinations(lines, 2):
        rates = []
        for cold, warm in ((x, y), (y, x)):
            pair = [lines[cold][1], lines[warm][1]]
            chance = sum(
                chance
                for chance, found in all_runs(
                    lambda choose, pair=pair: search.exchanged(list(pair), resampling("multinomial", choose))
                )
                if found[0] is pair[1]
            )
            rates.append(pi(cold, 0.5) * pi(warm, 2.0) * chance)
        assert math.isclose(*rates)
    assert swap_log_ratio(0.0, 1.0, 1.0, 2.0) == 0.5


def test_the_shared_pieces() -> None:
    rng = np.random.default_rng(0)
    for number in range(300):
        log_weights = rng.normal(scale=3, size=rng.integers(2, 9))
        over = rng.uniform(0.01, 1)
        weights = normalised(log_weights)
        for how in ("ess", "entropy", "base"):
            temperature = annealed(log_weights, over, how, 0.5, 0.5)
            assert temperature >= 1 and effective_size(log_weights / temperature) >= effective_size(log_weights) - 1e-9
            late = annealed(log_weights, over, how, 0.5, 0.0), annealed(log_weights, over, how, 0.0, 0.5)
            assert late == (1.0, 1.0)
        copies = np.bincount(systematic(weights, rng.uniform()), minlength=len(weights))
        assert (np.abs(copies - len(weights) * weights) < 1 + 1e-9).all(), number
    held = np.log([0.7, 0.1, 0.1, 0.1])
    assert annealed(held, 0.25, "ess", 0.6, 0.5) == pytest.approx(0.75 * 4 * 0.52)
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1)) / math.log(4)
    assert annealed(held, 0.25, "entropy", 0.6, 0.5) == pytest.approx(1 / (entropy + (1 - entropy) / 4))
    assert annealed(held, 0.25, "base", 0.6, 0.5) == 1.75
    grid = (np.arange(1000) + 0.5) / 1000
    assert np.bincount(multinomial(np.exp(held), grid)).tolist() == [700, 100, 100, 100]
    assert multinomial(np.array([0.5, 0.5 - 1e-16, 0.0]), [1 - 1e-16]) == [1]
    assert log_potential(0.8, "odds") == pytest.approx(math.log(4)) and log_potential(0.8, "prob") == math.log(0.8)
    assert log_potential(0.0, "odds") == pytest.approx(-log_potential(1.0, "odds")) == pytest.approx(math.log(1e-7))


END, MODEL, PROMPT = 0, TableModel(4, order=3), [1]
DRAWN = Sampler.from_settings(temperature=1.0)
SEARCHES = {
    "filter": ParticleFilter(Table(), particles=6),
    "systematic": ParticleFilter(Table(), particles=6, resampling="systematic", ended="freeze", potential="prob"),
    "gibbs": ParticleGibbs(Table(), particles=3, sweeps=3, reward_temperature=2.0),
    "tempering": ParallelTempering(Table(), particles=3, sweeps=3, temperatures=(1.0, 3.0)),
    "annealed": EntropicParticleFilter(Table(), particles=6, annealing="entropy", least=1.0),
    "fresh": EntropicParticleFilter(Table(), particles=4, lookahead="fresh"),
    "reuse": EntropicParticleFilter(Table(), particles=4, lookahead="reuse", resampling="multinomial"),
}


class Written(Toy):
    """Texts as the engine draws them: by the noise of their seeds."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__(lambda chances: 0, (4,) * length, True)
        self.root.seq.request = SimpleNamespace(seed=seed)

    def extend(self, parents: Sequence[Node]) -> Iterator[Any]:
        return [self.drawn(parent) for parent in parents]
        yield

    def drawn(self, parent: Node) -> Node:
        text, seed, number = parent.seq.tokens, parent.seq.request.seed, parent.children
        parent.children += 1
        if parent is self.root:
            seed = nth_seed(seed, number)
        elif number:
            seed = mix(seed, PARTICLE, len(text), number)
        scores = MODEL.logits([*PROMPT, *text]).log_softmax(-1) + gumbel(seed, len(text), torch.arange(4))
        child = self.child(parent, int(scores.argmax()))
        child.seq.request = SimpleNamespace(seed=seed)
        return child

    def child(self, parent: Node, token: int) -> Node:
        child = super().child(parent, token)
        if token == END:
            # The end itself is not shown to scorers.
            child.scores = (*parent.scores, reward(parent.seq.tokens))
        return child


def tuned(search: Any) -> Any:
    return replace(search, delimiter=(3,), step_tokens=1, rounds=8)


def search(found: Any, seed: int = 0, sampler: Sampler = DRAWN, **settings: Any) -> list[Any]:
    request = Request(PROMPT, sampler=sampler, seed=seed, max_new_tokens=6, eos_ids=(END,), **settings)
    return tuned(found).run(Engine(MODEL), request)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_engine_does_what_the_table_does(name: str) -> None:
    chosen = tuned(SEARCHES[name])
    for seed in (1, 2):
        found = search(chosen, seed)
        sweeps = run_sync(chosen.explore(Written(seed, 6), resampler(chosen.draws, uniforms(seed))))
        texts = {line.last.seq.tokens for sweep in sweeps for line in sweep.members}
        assert {tuple(seq.generated) for seq in found} == texts and len(found) == len(texts)
        best = reward(tuple(each for each in found[0].generated if each != END))
        assert found[0].score == pytest.approx(best) and best == max(seq.score for seq in found)
        ledger = found[0].trace.ledger
        if "log_normaliser" in ledger.counts:
            assert ledger.counts["log_normaliser"] == pytest.approx(sweeps[0].log_normaliser)
        grown = found[0].trace.grown
        assert sum(len(part.tokens) for part in grown) == ledger.tokens
        assert ledger.counts["discarded"] == ledger.tokens - len(found[0].generated)


@pytest.mark.parametrize("name", SEARCHES)
def test_narrow_and_cold_searches_are_plain_decoding(name: str) -> None:
    chosen = SEARCHES[name]
    settings = {"max_new_tokens": 6, "eos_ids": (END,)}
    for sampler in (DRAWN, Sampler.from_settings()):
        (plain,) = decode(MODEL, [PROMPT], seeds=(4,), sampler=sampler, **settings)
        one = {"particles": 1} | ({"sweeps": 1} if hasattr(chosen, "sweeps") else {})
        found = search(chosen if sampler.greedy else replace(chosen, **one), 4, sampler)
        assert [seq.generated for seq in found] == [plain.generated]
        # What is known is neither written nor scored again; drawn texts of two chains are two.
        if sampler.greedy or name != "tempering":
            ledger = found[0].trace.ledger
            assert ledger.tokens == ledger.scorer_calls == len(plain.generated)
    drafted = search(chosen, 4, drafter=PromptLookup())
    assert [seq.generated for seq in drafted] == [seq.generated for seq in search(chosen, 4)]


def test_temperatures_of_the_reward_go_from_the_best_to_all() -> None:
    frozen = ParticleFilter(Table(), particles=5, potential="odds", reward_temperature=1e-9)
    counts = search(frozen, 3)[0].trace.ledger.counts
    # Equal texts weigh the same.
    assert counts["resamplings"] <= counts["ancestors"] <= counts["effective"] + 1e-6 < 2 * counts["resamplings"]
    even = ParticleFilter(Table(), particles=5, resampling="systematic", reward_temperature=1e9)
    counts = search(even, 3)[0].trace.ledger.counts
    assert counts["ancestors"] == 5 * counts["resamplings"] and counts["effective"] == pytest.approx(
        counts["ancestors"]
    )
    plain = search(SEARCHES["systematic"], 3)
    settings = {"ended": "freeze", "potential": "prob", "least": 0.0}
    assert [seq.tokens for seq in search(EntropicParticleFilter(Table(), particles=6, **settings), 3)] == [
        seq.tokens for seq in plain
    ]


def test_texts_that_all_come_from_one_early_on_are_told_of() -> None:
    def record(*ancestors: int, texts: int = 8) -> None:
        sweep = Sweep(Node(SimpleNamespace(tokens=(), finished=False), 0), texts, None, None)
        sweep.history = [Resampled(step, 2.0, each) for step, each in enumerate(ancestors, 1)]
        sweep.steps = len(ancestors) + 1
        SEARCHES["filter"].record(sweep)

    with pytest.warns(UserWarning, match="all 8 texts come from one after 2 of 9 steps.*raise reward_temperature"):
        record(5, 1, 4, 4, 4, 4, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(5, 2, 2, 1, 4, 4, 4, 4)
        # Two texts are one at every other draw, whatever they weigh.
        record(1, 1, 1, 1, 1, 1, 1, 1, texts=2)


def test_votes_are_weights() -> None:
    chosen = tuned(replace(SEARCHES["filter"], choose="vote", answer="whole"))
    found = search(chosen, 2)
    (sweep,) = run_sync(chosen.explore(Written(2, 6), resampler("multinomial", uniforms(2))))
    shares: dict[Text, float] = {}
    for line, weight in zip(sweep.members, sweep.weights, strict=True):
        text = tuple(token for token in line.last.seq.tokens if token != END)
        shares[text] = shares.get(text, 0.0) + weight
    assert {tuple(t for t in seq.generated if t != END): seq.score for seq in found} == pytest.approx(shares)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ParticleFilter, {"particles": 0}, "particles of at least 1"),
        (ParticleFilter, {"potential": "log"}, "potential of particle-filter is odds or prob"),
        (ParticleFilter, {"resampling": "residual"}, "resamples multinomial or systematic"),
        (ParticleFilter, {"reward_temperature": 0.0}, "reward_temperature must be"),
        (ParticleGibbs, {"particles": 1}, "at least 2 particles"),
        (ParallelTempering, {"temperatures": (2.0, 1.0)}, "two or more that rise"),
        (EntropicParticleFilter, {"annealing": "linear"}, "anneals by ess, entropy or base"),
        (EntropicParticleFilter, {"lookahead": "far"}, "lookahead of entropic-particle-filter is"),
    ],
)
def test_settings_that_mean_nothing_are_refused(kind: type, settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        kind(Table(), **settings)


def test_what_is_no_probability_is_refused() -> None:
    class Large(Table):
        def score(self, candidates: Candidates) -> torch.Tensor:
            return super().score(candidates) + 1

    for kind in (ParticleFilter, AStar):
        with pytest.raises(SettingsError, match="takes rewards between 0 and 1"):
            search(kind(Large()))
