"""The laws of a judge over Gaussian samples, against draws by the library's own choice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decodery_benchmarks.judge_theory import (
    averaged,
    averaged_of_many,
    best_k,
    best_of_k,
    chosen,
    many_samples,
    nearest_of_many,
    one_sample,
    ridge,
    warm_judge,
)


def measured(b: float, c: float, s: float, k: int, temperature: float, draws: int, seed: int) -> tuple[float, float]:
    """The mean loss and its standard error; the right answer is 0."""
    samples = np.random.default_rng(seed).normal(b, s, (draws, k))
    losses = chosen(samples, c, temperature, seed) ** 2
    return float(losses.mean()), float(losses.std() / math.sqrt(draws))


def test_closed_forms_agree_with_draws_and_their_neighbours_do_not() -> None:
    random = np.random.default_rng(1)
    caught = 0
    for trial in range(12):
        b, c, s = random.uniform(-1, 1), random.uniform(-1, 1), random.uniform(0.5, 1.5)
        k = int(random.choice([2, 4, 16]))
        found, error = measured(b, c, s, k, 0.0, 20_000, trial)
        assert abs(found - best_of_k(b, c, s, k)) < 4 * error, (b, c, s, k)
        caught += abs(found - best_of_k(b, -c, s, k)) > 4 * error
        assert best_of_k(b, c, s, 1) == pytest.approx(one_sample(b, s), rel=1e-5)
        found, error = measured(b, c, s, 1, 0.0, 20_000, trial)
        assert abs(found - one_sample(b, s)) < 4 * error
    assert caught > 3


def test_a_warm_judge_and_one_of_many_samples() -> None:
    for trial, (b, c, s) in enumerate([(0.5, 0.0, 1.0), (-0.6, 0.4, 0.8)]):
        found, error = measured(b, c, s, 4, 25.0, 6000, trial)
        assert abs(found - warm_judge(b, c, s, 25.0, 4)) < 4 * error + 0.02
        found, error = measured(b, c, s, 400, 1.0, 3000, trial)
        assert abs(found - many_samples(b, c, s, 1.0)) < 4 * error + 0.01
        # The target that is best for the judge is not the answer: it makes up for the bias.
        rho = 2 * s * s
        assert many_samples(b, -b / rho, s, 1.0) < many_samples(b, 0.0, s, 1.0)
    # Where the judge's error is large enough, a second sample hurts already.
    assert warm_judge(1.0, 2.0, 1.0, 25.0, 2) > one_sample(1.0, 1.0) > warm_judge(1.0, 1.0, 1.0, 25.0, 2)


def test_how_fast_the_loss_falls_and_where_it_rises_again() -> None:
    assert best_of_k(0.3, 0.0, 1.0, 2048) == pytest.approx(nearest_of_many(0.3, 1.0, 2048), rel=0.01)
    slopes = {}
    for spread in (math.sqrt(0.1), 1.0):
        losses = [averaged(spread, 1.0, k) for k in (64, 1024)]
        slopes[spread] = math.log(losses[1] / losses[0]) / math.log(16)
    easy, hard = slopes.values()
    assert easy == pytest.approx(-2.0, abs=0.05) and -1.5 < hard < -1.0
    assert averaged(math.sqrt(0.1), 1.0, 1024) * 1024**2 == pytest.approx(3.50, abs=0.02)
    assert averaged_of_many(math.sqrt(0.1), 1.0, 1024) * 1024**2 == pytest.approx(3.512, abs=0.001)
    assert averaged_of_many(1.0, 1.0, 64) == math.inf
    # A judge that errs has a number of samples that is best; one that does not has none.
    assert 1 < best_k(1.0, -0.7, 1.0, 1024) < 1024 == best_k(1.0, 0.0, 1.0, 1024)
    assert best_of_k(1.0, -0.7, 1.0, 1 << 14) == pytest.approx(0.49, abs=1e-3)


def test_regression_with_many_features_has_the_bias_and_spread_of_its_equivalent() -> None:
    n, d, noise, random = 400, 200, 0.5, np.random.default_rng(0)
    weights = random.normal(size=d)
    weights /= np.linalg.norm(weights)
    prior = d**-0.5
    losses, spreads = [], []
    for _ in range(12):
        inputs = random.normal(size=(n, d))
        precision = inputs.T @ inputs / noise**2 + np.eye(d) / prior**2
        covariance = np.linalg.inv(precision)
        found = covariance @ inputs.T @ (inputs @ weights + noise * random.normal(size=n)) / noise**2
        losses.append(np.sum((found - weights) ** 2))
        spreads.append(np.trace(covariance))
    bias, variance, spread = ridge(d, n, noise, prior, 1.0)
    assert np.mean(losses) == pytest.approx(bias + variance, rel=0.05)
    assert np.mean(spreads) == pytest.approx(spread, rel=0.05)
