"""Prices of steps, learned from a simulated clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from decodery.core.native.kernels import library
from decodery.step.pass_prices import MARGIN, NativePrices, PassPrices, Promises, monotone
from decodery.step.prior_prices import PriorPrices, prior_prices
from decodery.testing import TableModel, tiny_transformer

PRIOR = PriorPrices(read=0.03, row=0.002, token=1e-6, row_token=2e-7)


class Clock:
    """Steps that take what `truth` says by drafted rows, texts and context, on a machine that is disturbed at times.

    Args:
        truth: Seconds.
        disturbed: Of how many steps in 100 the duration is many times longer.
    """

    def __init__(self, truth: Callable[[int, int, float], float], disturbed: int = 3) -> None:
        self._truth, self._disturbed = truth, disturbed
        self._generator = np.random.default_rng(1)

    def step(self, nodes: int, texts: int, context: float) -> float:
        factor = 20.0 if self._generator.integers(100) < self._disturbed else self._generator.normal(1, 0.03)
        return factor * self._truth(nodes, texts, context)


def dear(nodes: int, texts: int, context: float) -> float:
    """Three times the prior's, with a step at the eighth row, and rows that cost much where many texts take part."""
    rows = texts + nodes
    return 0.09 + 0.02 * (rows > 8) + 0.0006 * rows + 0.0015 * nodes * (texts > 4) + 3e-6 * context * rows


def best(costs: np.ndarray, texts: int, chance: float, limit: int) -> int:
    """The number of drafted rows that gives most tokens per second, where each next one is likely by `chance` less."""
    tokens = texts + texts * np.cumsum(chance ** np.repeat(np.arange(1, limit // texts + 1), texts)) / texts
    return int(np.argmax([texts / costs[0], *(tokens / costs[1 : len(tokens) + 1] / MARGIN)]))


@pytest.mark.parametrize(("texts", "context"), [(1, 100), (1, 4000), (16, 100), (64, 600)])
def test_prices_come_near_the_truth_after_a_few_dozen_steps(texts: int, context: float) -> None:
    """Of the kinds of steps that were made, relative to each other; the prior's own are far off."""
    clock, prices, generator = Clock(dear), PassPrices(PRIOR), np.random.default_rng(0)
    kinds = (0, 2, 4, 8, 16)
    for _ in range(200):
        nodes = int(generator.choice(kinds))
        prices.learn(texts + nodes, texts, context, clock.step(nodes, texts, context))
    truth = np.array([dear(nodes, texts, context) for nodes in kinds])
    found, prior = prices.seconds(texts, context)[[*kinds]], PassPrices(PRIOR).seconds(texts, context)[[*kinds]]
    assert np.allclose(found / found[0], truth / truth[0], rtol=0.05)
    assert np.allclose(found, truth, rtol=0.2)
    assert not np.allclose(prior, truth, rtol=0.3)


@pytest.mark.parametrize("texts", [4, 16, 64])
def test_drafting_stops_where_it_does_not_pay(texts: int) -> None:
    """With drafts that come true in 6 of 10 cases; prices of one text, used for many, go on losing."""

    def truth(nodes: int, texts: int, context: float) -> float:
        # One text's rows are nearly free; those of many cost as much each as they bring.
        return 0.03 * (1 + 0.01 * nodes) if texts == 1 else 0.03 * (1 + 0.8 * nodes / texts)

    def tokens_per_second(texts_of_prices: int) -> float:
        clock, prices, rates = Clock(truth), PassPrices(PRIOR), list[float]()
        for _ in range(100):
            for nodes in (0, 4, 16, 64):
                prices.learn(1 + nodes, 1, 100, clock.step(nodes, 1, 100))
        for _ in range(400):
            known = prices.knows_plain(texts, 100)
            nodes = best(prices.seconds(texts_of_prices, 100), texts, 0.6, 4 * texts) if known else 0
            prices.learn(texts + nodes, texts, 100, clock.step(nodes, texts, 100))
            won = texts * sum(0.6**depth for depth in range(1, nodes // texts + 1)) + nodes % texts * 0.6 ** (
                nodes // texts + 1
            )
            rates.append((texts + won) / truth(nodes, texts, 100) / (texts / truth(0, texts, 100)))
        return float(np.mean(rates[40:]))

    assert tokens_per_second(texts) > 0.99
    assert tokens_per_second(1) < 0.98


def test_a_machine_that_becomes_slower_is_followed() -> None:
    """Twice as slow, in all steps; and one kind of step that stays disturbed is believed after a few."""
    prices = PassPrices(PRIOR)
    for factor in (1.0, 2.0):
        for number in range(60):
            nodes = 4 * (number % 2)
            prices.learn(1 + nodes, 1, 10, factor * (0.05 + 0.005 * nodes))
        found = prices.seconds(1, 10)
        assert found[0] == pytest.approx(factor * 0.05, rel=0.1) and found[4] / found[0] == pytest.approx(1.4, rel=0.05)
    for _ in range(12):
        prices.learn(5, 1, 10, 0.9)
    assert prices.seconds(1, 10)[4] > 3 * prices.seconds(1, 10)[0]


def test_no_number_of_rows_is_cheaper_than_fewer() -> None:
    generator = np.random.default_rng(0)
    prices = PassPrices(PRIOR)
    for _ in range(300):
        rows = int(generator.integers(1, 600))
        prices.learn(rows, 1, float(generator.integers(2000)), float(generator.exponential()))
    for context in (0, 300, 5000):
        assert (np.diff(prices.seconds(1, context)) >= 0).all() and (prices.seconds(1, context) > 0).all()
    assert monotone(np.array([1.0, 3.0, 2.0, 2.0]), np.array([1.0, 1.0, 1.0, 2.0])).tolist() == [1.0, 2.25, 2.25, 2.25]


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
def test_native_prices_are_those_in_python() -> None:
    """After any steps, outliers and a unit of weights that is written anew included."""
    generator = np.random.default_rng(3)
    for prior in (PRIOR, PriorPrices(read=0.001, row=0.004, text=1e-4)):
        native, plain = NativePrices(prior), PassPrices(prior)
        for number in range(400):
            texts = int(generator.choice([1, 3, 16, 64, 300]))
            rows, context = texts + int(generator.choice([0, 0, 1, 5, 31, 700])), float(generator.integers(5000))
            seconds = float(generator.exponential()) * (8 if number % 9 == 0 else 1)
            if number == 200:
                native._struct.gain = plain._gain = 1e12
            for prices in (native, plain):
                prices.learn(rows, texts, context, seconds)
            if number % 3 == 0:
                assert np.allclose(native.seconds(texts, context, 700), plain.seconds(texts, context, 700), rtol=1e-9)
            assert native.knows_plain(texts, context) == plain.knows_plain(texts, context)


def test_promises_are_worth_what_was_kept_of_them() -> None:
    """By the number of texts that share a pass."""
    promises, generator = Promises(), np.random.default_rng(0)
    assert promises.rate(1) == 1
    for _ in range(600):
        promises.learn(1, 2.0, int(generator.binomial(4, 0.25)))
        promises.learn(16, 2.0, 2)
    assert promises.rate(1) == pytest.approx(0.5, abs=0.08) and promises.rate(16) == pytest.approx(1.0, abs=0.02)


def test_the_prior_is_known_without_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose passes fail has one, too; of the same weights more layers take longer."""
    small, large = (tiny_transformer(num_layers=layers) for layers in (2, 8))
    for model in (small, large):
        monkeypatch.setattr(model, "forward", None)
    rows = np.arange(1.0, 100.0)
    cheap, costly = (prior_prices(model).seconds(rows, 1, 10) for model in (small, large))
    assert (costly > cheap).all() and (np.diff(cheap) > 0).all()
    assert (prior_prices(TableModel()).seconds(rows, 1, 10) > 0).all()
