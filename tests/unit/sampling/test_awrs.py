"""Adaptive weighted rejection sampling: its estimators by enumeration, its rule against masks, checkers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import decodery as dc
from covering import FULL
from decodery.constraints import Checker, Choice
from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.noise import gumbel_argmax
from decodery.sampling import Sampler
from decodery.sampling.awrs import TokenTrial, first_accepted, geometric, in_order, recursive, weighted
from decodery.sampling.constraint import Constrained, Constraint
from decodery.speculative.acceptance.awrs import AWRS
from decodery.testing import check_batch, check_constraint, check_identical, check_state, decode
from decodery.testing.statistics import chi_square
from languages import ENDS, LANGUAGES, OTHER, PROMPTS, TARGET, VOCABULARY, constrained
from methods import DRAFTERS

P = np.array([0.31, 0.26, 0.2, 0.17, 0.06])
SUBSETS = [frozenset(each) for size in range(6) for each in itertools.combinations(range(5), size)]
Estimator = Callable[..., TokenTrial]


def orders(p: np.ndarray) -> list[tuple[tuple[int, ...], float]]:
    """All orders of draws without replacement, with their probabilities."""
    found = []
    for order in itertools.permutations(range(len(p))):
        left, probability = 1.0, 1.0
        for token in order:
            probability *= p[token] / left
            left -= p[token]
        found.append((order, probability))
    return found


def error(estimator: Estimator, budget: float, p: np.ndarray = P) -> float:
    """The largest |E[w 1{a}] - p(a) 1{a accepted}| over tokens and sets of accepted tokens."""
    worst = 0.0
    for accepted in SUBSETS:
        mean = np.zeros(len(p))
        for order, probability in orders(p):
            found = estimator(p, order, accepted.__contains__, budget)
            if found.token is not None:
                mean[found.token] += probability * math.exp(found.log_weight)
        worst = max(worst, float(np.abs(mean - p * [token in accepted for token in range(len(p))]).max()))
    return worst


def no_tail(p: np.ndarray, order: Sequence[int], accept: Callable[[int], bool], budget: float) -> TokenTrial:
    """Wrong on purpose: what was not rejected counts as accepted."""
    found = first_accepted(order, accept)
    left = 1 - sum(p[token] for token in order[: found.rejections])
    return TokenTrial(found.token, -math.inf if found.token is None else math.log(left), found.checks, found.rejections)


def test_the_recursive_weights_are_unbiased_by_enumeration() -> None:
    for budget in (math.inf, 2, 3, 4):
        assert error(recursive, budget) < 1e-12
    assert error(recursive, math.inf, np.array([0.9, 0.1 - 1e-9, 1e-9 - 1e-15, 1e-15, 0.0])) < 1e-12
    assert error(no_tail, math.inf) > 0.05


def test_a_budget_bounds_the_checks() -> None:
    for order, _ in orders(P):
        for accepted in SUBSETS:
            found = recursive(P, order, accepted.__contains__)
            assert found.checks <= found.rejections + 2
            assert recursive(P, order, accepted.__contains__, 2).checks <= 3


def naive(p: np.ndarray, order, accept, uniform, accepts: int, budget: float) -> TokenTrial:
    """Wrong on purpose: the share of accepted draws, where one accepted draw ended the sample."""
    found = geometric(p, order, accept, uniform, accepts, budget)
    if found.token is None:
        return found
    draws = 1 + min(accepts - 1, 1) / math.exp(found.log_weight)
    return TokenTrial(found.token, math.log(accepts / draws), found.checks, found.rejections)


@pytest.mark.parametrize(("accepts", "budget"), [(2, math.inf), (3, math.inf), (2, 2), (2, 5), (4, 3)])
def test_the_geometric_weights_are_unbiased(accepts: int, budget: float) -> None:
    assert deviation(geometric, accepts, budget) < 3


def test_biased_weights_are_caught() -> None:
    assert deviation(naive, 2, math.inf) > 10


def deviation(estimator: Estimator, accepts: int, budget: float, draws: int = 3000) -> float:
    """The largest distance of a mean weight from its value, in standard errors."""
    random = np.random.default_rng(5)
    worst = 0.0
    for accepted in ({0, 3}, {4}, {1, 2, 3, 4}):
        weights = np.zeros((draws, 5))
        keys = np.log(P) + random.gumbel(size=(draws, 5))
        for draw, order in enumerate(np.argsort(-keys).tolist()):
            found = estimator(P, order, accepted.__contains__, random.random, accepts, budget)
            if found.token is not None:
                weights[draw, found.token] = math.exp(found.log_weight)
        for token in accepted:
            spread = weights[:, token].std() / draws**0.5
            worst = max(worst, abs(weights[:, token].mean() - P[token]) / spread)
    return worst


def test_unweighted_draws_follow_the_law_of_what_is_accepted() -> None:
    law, accepted = torch.from_numpy(np.log(P)), {0, 2, 4}
    counts, wrong = np.zeros(5), np.zeros(5)
    for seed in range(3000):
        order = list(in_order(law, seed, 3))
        counts[first_accepted(order, accepted.__contains__).token] += 1
        # Wrong on purpose: a rejected token hands its place to its neighbour.
        wrong[order[0] if order[0] in accepted else (order[0] + 1) % 5] += 1
    cut = np.where([token in accepted for token in range(5)], P, 0)
    assert chi_square(counts, cut / cut.sum()) > 1e-4 > chi_square(wrong, cut / cut.sum())


@pytest.mark.parametrize("size", [5, 300, 20_000])
def test_the_order_is_that_of_the_noise(size: int) -> None:
    law = 3 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    law[1::7] = -torch.inf
    left, order = law.clone(), in_order(law, 11, 4)
    for _ in range(min(40, size // 2)):
        token = next(order)
        assert token == int(gumbel_argmax(left[None], 11, [4]))
        left[token] = -torch.inf
    assert sorted(order) == torch.isfinite(left).nonzero().flatten().tolist()
    assert list(in_order(law, None, 0))[:3] == np.lexsort((np.arange(size), -law.numpy()))[:3].tolist()


def test_peaked_laws_are_weighed_by_the_geometric_estimator() -> None:
    peaked, uniforms = torch.tensor([4.0, 0.0, 0.0]), []
    found = weighted(peaked, {1}.__contains__, 0, 0, lambda: uniforms.append(0.5) or 0.5)
    assert found.token == 1 and uniforms
    p = float(peaked.double().softmax(-1)[1])
    mean = np.mean(
        [
            math.exp(weighted(peaked, {1}.__contains__, seed, 0, np.random.default_rng(seed).random).log_weight)
            for seed in range(400)
        ]
    )
    assert abs(mean / p - 1) < 0.2


class Maskless(Constraint):
    """A constraint whose masks must not be asked for."""

    def __init__(self, inner: Constraint) -> None:
        self.inner = inner
        self.init, self.advance, self.is_complete, self.accepts = (
            inner.init, inner.advance, inner.is_complete, inner.accepts,
        )  # fmt: skip

    def init(self, prompt): ...
    def advance(self, state, token): ...
    def is_complete(self, state): ...

    def allowed(self, state):
        raise AssertionError("a mask was worked out")


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_rule_writes_what_masks_write(name: str) -> None:
    asked = list(zip(PROMPTS, (0, 5), strict=True))
    for turn, settings in enumerate(({}, {"temperature": 1.0}, {"temperature": 0.7, "repetition_penalty": 1.3})):
        masked = constrained(LANGUAGES[name], **settings)
        tried = Sampler((Constrained(Maskless(masked.processors[0].constraint)), *masked.processors[1:]))
        for prompt, seed in asked if FULL else asked[turn % 2 :][:1]:
            (plain,) = decode(TARGET, [prompt], sampler=masked, eos_ids=ENDS, seeds=(seed,), max_new_tokens=24)
            (ours,) = decode(
                TARGET, [prompt], sampler=tried, acceptance_rule=AWRS(), eos_ids=ENDS, seeds=(seed,), max_new_tokens=24
            )
            assert ours.generated == plain.generated
            counts = ours.trace.ledger.counts
            assert counts["checks"] - counts["rejections"] == len(ours.generated)


def test_the_rule_keeps_the_laws_of_speculation() -> None:
    sampler = constrained(LANGUAGES["json-schema"], temperature=1.0)
    for name in ("prompt-lookup", "token-recycling", "draft-model"):
        drafter = DRAFTERS[name](OTHER)
        check_identical(
            TARGET, PROMPTS, drafter=drafter, acceptance_rule=AWRS(), sampler=sampler, eos_ids=ENDS, seeds=(3,)
        )
    check_batch(TARGET, PROMPTS, drafter=drafter, acceptance_rule=AWRS(), sampler=sampler, seeds=(0,))
    check_state(TARGET, PROMPTS, drafter=drafter, acceptance_rule=AWRS(), sampler=sampler, max_new_tokens=12)


@pytest.mark.parametrize("name", LANGUAGES)
def test_single_tokens_are_accepted_as_masks_allow_them(name: str) -> None:
    fresh, masked = LANGUAGES[name].compile(VOCABULARY), LANGUAGES[name].compile(VOCABULARY)
    random = np.random.default_rng(1)
    for _ in range(3):
        state, other = fresh.init([]), masked.init([])
        for _ in range(12):
            allowed = masked.allowed(other)
            assert [fresh.accepts(state, token) for token in range(VOCABULARY.size)] == allowed.tolist()
            token = int(random.choice(np.flatnonzero(allowed)))
            state, other = fresh.advance(state, token), masked.advance(other, token)


def one_of(options: Sequence[str]) -> Checker:
    return Checker(lambda text: any(each.startswith(text.rstrip("\ufffd")) for each in options), options.__contains__)


def test_checkers_keep_the_law_of_constraints() -> None:
    options = ("name", "names", "no\nage")
    whole = replace(VOCABULARY, pieces=[piece if piece.isascii() else b"" for piece in VOCABULARY.pieces])
    for walk in check_constraint(one_of(options).compile(whole), ENDS, walks=6):
        assert walk[-1] in ENDS and VOCABULARY.bytes_of(walk).decode() in options


def test_checkers_read_whole_characters() -> None:
    options = ("né", "name")
    checker = one_of(options).compile(VOCABULARY)
    reference = Choice(options, mode="strict").compile(VOCABULARY)
    state, other = checker.init([]), reference.init([])
    for token in (*b"n", *b"\xc3\xa9"):
        ours, theirs = checker.allowed(state), reference.allowed(other)
        # This function takes any character that is cut for the one that was meant, until it is whole.
        assert (ours >= theirs).all() and not ours[~theirs][:128].any()
        state, other = checker.advance(state, token), reference.advance(other, token)
    assert checker.is_complete(state) and checker.accepts(state, ENDS[0])


def test_a_checker_that_accepts_a_dead_end_says_so() -> None:
    lost = Checker(lambda text: text in ("a", "ab"), lambda text: False)
    sampler = constrained(lost, temperature=1.0)
    with pytest.raises(ConstraintError, match="nothing can complete"):
        decode(TARGET, PROMPTS[:1], sampler=sampler, acceptance_rule=AWRS(), eos_ids=ENDS)


def test_requests_choose_the_rule_that_suits_the_constraint(smollm2: dc.LLM) -> None:
    asked = []

    def prefix(text: str) -> bool:
        asked.append(text)
        return text.isdigit() and len(text) < 4

    checker = Checker(prefix, lambda text: len(text) == 3)
    found = [smollm2.generate("A number:", constraint=checker, seed=4, temperature=1.0, drafter=None)]
    found.append(smollm2.generate("A number:", constraint=checker, seed=4, temperature=1.0, drafter="prompt-lookup"))
    assert found[0].tokens == found[1].tokens and found[0].text.isdigit() and len(found[0].text) == 3
    assert found[0].trace.ledger.counts["checks"] < len(asked) + 10 < 20_000
    with pytest.raises(
        SettingsError, match="the processor top-p needs the mask of a constraint, which the acceptance rule awrs"
    ):
        smollm2.generate("A number:", constraint=checker, temperature=1.0, top_p=0.9)
    with pytest.raises(SettingsError, match="build the method in Python"):
        smollm2.generate("A number:", constraint="checker:prefix=isdigit")


@pytest.mark.parametrize("settings", [{"min_new_tokens": 5}, {"no_repeat_ngram": 1}, {"min_new_tokens": 30}])
def test_a_mask_that_would_leave_nothing_is_not_applied_without_masks_either(settings: dict) -> None:
    prompt = PROMPTS[0]
    for name in ("choice", "regex"):
        masked = constrained(LANGUAGES[name], temperature=1.0, eos_ids=ENDS, **settings)
        tried = Sampler((Constrained(Maskless(masked.processors[0].constraint)), *masked.processors[1:]))
        for seed in range(3):
            (plain,) = decode(TARGET, [prompt], sampler=masked, eos_ids=ENDS, seeds=(seed,), max_new_tokens=40)
            (found,) = decode(
                TARGET, [prompt], sampler=tried, acceptance_rule=AWRS(), eos_ids=ENDS, seeds=(seed,), max_new_tokens=40
            )
            assert (found.generated, found.finish_reason) == (plain.generated, plain.finish_reason)
