"""Sequential Monte Carlo over tiny models, over constraints, and over a real one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import decodery as dc
from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.noise import PARTICLE, mix
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained, Constraint
from decodery.scorers.text import TextScore
from decodery.search.particles import effective_size, log_mean, systematic
from decodery.search.smc import SMC
from decodery.testing import TableModel, decode
from toy_world import END, MODEL, PLAIN, PROMPT, TARGETS, Psi, population, search


@pytest.mark.parametrize("name", TARGETS)
def test_the_search_does_what_the_toy_does(name: str) -> None:
    target, block, moves, changes = TARGETS[name]
    toy = population(30, target, block, moves, seed=6, **changes)
    smc = SMC(
        *(30, block, "tempered" if target.power is None else "powered", target.power or 4.0, Psi()),
        lookahead=target.rollouts,
        rollout_temperature=target.temperature,
        moves=moves,
        **changes,
    )
    found = search(smc, seed=6)
    assert [tuple(seq.generated) for seq in found.sequences] == [particle.text for particle in toy.members]
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
    """a is nine times as likely as b, and after it c is next to impossible."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        rows = {1: (0, 0, 0, 0.001, 0.999), 2: (0, 0, 0, 1, 0), 3: (1, 0, 0, 0, 0), 4: (0, 0.9, 0.1, 0, 0)}
        return torch.tensor(rows[tokens[-1]], dtype=torch.float64).log()


FORKED = {"sampler": Sampler((Constrained(Fork()), *PLAIN.processors)), "eos_ids": (END,)}


@pytest.mark.integration
def test_what_is_hard_to_complete_loses_its_weight() -> None:
    request = Request([4], **FORKED, max_new_tokens=8)
    found = SMC(2000).posterior(Engine(Deceptive(5)), request)
    weights = np.exp(found.log_weights)
    share = sum(weight for seq, weight in zip(found.sequences, weights, strict=True) if seq.generated[0] == 1)
    assert abs(share - 0.0009 / 0.1009) < 0.005
    assert abs(math.exp(found.log_normaliser) - 0.1009) < 0.03
    # Wrong on purpose: a mask renormalises, and begins with a nine times out of ten.
    masked = decode(Deceptive(5), [[4]], seeds=range(50), max_new_tokens=8, **FORKED)
    assert sum(seq.generated[0] == 1 for seq in masked) > 40


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
    counts = majority[0].trace.ledger.counts
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
        ({"potential": lambda text: 1.0}, "is not an instance of a scorer method"),
        ({"strict": False, "target": "powered"}, "leave target out"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        SMC(**settings)


def test_the_published_mixture_and_errors_of_potentials() -> None:
    mixed = search(SMC(12, 2, potential=Psi(), strict=False, moves=1, threshold=1.0))
    assert len(mixed.sequences) == 12 and mixed.counts["moves"] > 0
    with pytest.raises(SettingsError, match="give a temperature"):
        search(SMC(2), sampler=Sampler.from_settings())
    with pytest.raises(SettingsError, match="reads text"):
        search(SMC(2, potential=TextScore(len)))
    with pytest.raises(SettingsError, match="a number or -inf"):
        search(SMC(2, potential=TextScore(lambda text: math.nan, decode=str)))


def test_texts_of_a_real_model_follow_constraint_and_potential(smollm2_int8: dc.LLM) -> None:
    digits = dc.constraints.Checker(lambda text: set(text) <= set("37") and len(text) < 4, lambda text: len(text) == 3)

    def sevens(text: str) -> float:
        return 8.0 * text.count("7")

    potential = TextScore(sevens, sevens, logarithmic=True)
    settings = {"temperature": 1.0, "max_new_tokens": 5, "constraint": digits}
    found = smollm2_int8.search("A number of three digits:", SMC(6, 1, potential=potential, moves=0), **settings)
    assert all(len(out.text) == 3 and set(out.text) <= set("37") and out.finish_reason == "stop" for out in found)
    assert "7" in found[0].text and found[0].trace.ledger.scorer_calls > 8
    assert math.isclose(sum(math.exp(out.score) for out in found), 1.0)
