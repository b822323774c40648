"""The density-ratio rule on models whose densities are known: by integration, and by the laws of what it emits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from scipy.stats import ks_1samp, ks_2samp, norm

from decodery.core import noise
from decodery.core.errors import SettingsError, UnknownMethod
from decodery.engine.continuous import generate_values
from decodery.engine.request import Request
from decodery.speculative.acceptance.continuous.density_ratio import (
    Density,
    DensityRatio,
    Emitted,
    acceptance,
    draw,
    draw_residual,
    thinning,
    uniforms,
    worst_case,
)
from decodery.testing.continuous import Diffusion, DiffusionChain, Mixture, MixtureChain

NARROW = Mixture(np.array([0.3, 0.7]), np.array([[-1.0], [1.0]]), np.array([[0.5], [0.8]]))
WIDE = Mixture(np.array([1.0]), np.array([[0.4]]), np.array([[1.3]]))
GRID = np.linspace(-12, 12, 48_001)
STEP = GRID[1] - GRID[0]


def density(law: Mixture) -> np.ndarray:
    return np.exp(law.log_prob(GRID[:, None]))


@pytest.mark.parametrize(("p", "q"), [(NARROW, WIDE), (WIDE, NARROW), (NARROW, NARROW)])
def test_what_is_emitted_integrates_to_the_target(p: Mixture, q: Mixture) -> None:
    accepted = density(q) * acceptance(p, q, GRID[:, None])
    rejected = 1 - accepted.sum() * STEP
    rest = density(p) * thinning(p, q, GRID[:, None])
    mass = rest.sum() * STEP
    emitted = accepted + (rejected * rest / mass if mass > 1e-9 else 0)
    assert np.abs(emitted - density(p)).max() < 1e-9
    # Both masses are the distance between the two laws.
    assert rejected == pytest.approx(mass, abs=1e-9)


def test_the_residual_is_drawn_by_thinning() -> None:
    drawn = [draw_residual(NARROW, WIDE, seed, 0, 10_000) for seed in range(1500)]
    assert not any(exhausted for _, exhausted in drawn)
    rest = np.maximum(density(NARROW) - density(WIDE), 0)
    cdf = np.cumsum(rest) / rest.sum()
    values = np.concatenate([value for value, _ in drawn])
    assert ks_1samp(values, lambda x: np.interp(x, GRID, cdf)).pvalue > 1e-3
    # The target itself is not the residual.
    assert ks_1samp(values, lambda x: _cdf(NARROW, x)).pvalue < 1e-6


def test_running_out_of_tries_is_counted() -> None:
    value, exhausted = draw_residual(NARROW, NARROW, 0, 0, 130)
    assert exhausted and value.shape == (1,)
    chances = np.linspace(0, 1, 100_001)
    assert worst_case(100) == pytest.approx((chances * (1 - chances) ** 100).max(), rel=0.01)
    target = MixtureChain.random(1, 2, seed=1)
    run = generate_values(target, 40, 1, drafter=target.nearby(1.5, 2), acceptance_rule=DensityRatio(tries=1))
    assert run.exhausted > 0


def _cdf(law: Mixture, x: np.ndarray) -> np.ndarray:
    scaled = (np.asarray(x)[..., None] - law.means[:, 0]) / law.widths[:, 0]
    return (law.weights * norm.cdf(scaled)).sum(axis=-1)


@dataclass(frozen=True)
class NoResidual(DensityRatio):
    """Draws from the target after a rejection."""

    def choose(self, drafted, p, q, seed, position) -> Emitted:
        right = super().choose(drafted, p, q, seed, position)
        behind = p[right.accepted].sample(uniforms(seed, position + right.accepted, 0, 1, p[0].numbers, noise.RESIDUAL))
        return Emitted(right.accepted, behind[0]) if right.accepted < len(drafted) else right


@dataclass(frozen=True)
class Softened(DensityRatio):
    """Divides distances by 42^2 before the test, as the published code does."""

    def choose(self, drafted, p, q, seed, position) -> Emitted:
        softer = [_Soft(each) for each in p], [_Soft(each) for each in q]
        return super().choose(drafted, *softer, seed, position)


@dataclass(frozen=True)
class _Soft:
    law: Density
    exact = True

    @property
    def numbers(self) -> int:
        return self.law.numbers

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        return self.law.log_prob(x) / 42**2

    def sample(self, given: np.ndarray) -> np.ndarray:
        return self.law.sample(given)

    def along(self, given: np.ndarray) -> Density:
        return self


def first_two(target: MixtureChain, size: int, seeds: range, **settings) -> np.ndarray:
    """[seeds, 2, size] first two values."""
    runs = [generate_values(target, 3, size, seed=seed, alone=0, **settings) for seed in seeds]
    return np.stack([run.values[:2] for run in runs])


@cache
def _plain(size: int, count: int) -> np.ndarray:
    return first_two(MixtureChain.random(size, 2, seed=1), size, range(10**6, 10**6 + count))


def law_holds(target: MixtureChain, values: np.ndarray) -> float:
    """The least p-value over coordinates: the first value against its law, the second against plain draws."""
    (first,) = target.densities(np.zeros((0, values.shape[2])), 0)
    plain = _plain(values.shape[2], len(values))
    p_values = []
    for axis in range(values.shape[2]):
        one_axis = Mixture(first.weights, first.means[:, [axis]], first.widths[:, [axis]])
        p_values.append(ks_1samp(values[:, 0, axis], lambda x, law=one_axis: _cdf(law, x)).pvalue)
        p_values.append(ks_2samp(values[:, 1, axis], plain[:, 1, axis]).pvalue)
        # What the second value inherits from the first.
        p_values.append(ks_2samp(values[:, :, axis].prod(axis=1), plain[:, :, axis].prod(axis=1)).pvalue)
    return min(p_values)


@pytest.mark.invariant
@pytest.mark.parametrize("size", [1, 4])
def test_drafts_keep_the_law_of_the_values(size: int) -> None:
    target = MixtureChain.random(size, 2, seed=1)
    settings = {"drafter": target.nearby(1.5, seed=2), "gamma": 2}
    assert law_holds(target, first_two(target, size, range(500), **settings)) > 1e-3


@pytest.mark.invariant
@pytest.mark.parametrize("wrong", [NoResidual(), Softened()])
def test_wrong_rules_do_not(wrong: DensityRatio) -> None:
    target = MixtureChain.random(1, 2, seed=1)
    settings = {"drafter": target.nearby(1.5, seed=2), "gamma": 2, "acceptance_rule": wrong}
    assert law_holds(target, first_two(target, 1, range(1000), **settings)) < 1e-6


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    target = MixtureChain.random(3, 2, seed=4)
    run = generate_values(target, 21, 3, drafter=target, gamma=4, alone=0)
    assert run.accepted == run.drafted == 16 and run.values_per_pass == pytest.approx(21 / 5)
    assert (run.values == generate_values(target, 21, 3).values).all()
    near = generate_values(target, 200, 3, drafter=target.nearby(0.2, 1), gamma=4)
    far = generate_values(target, 200, 3, drafter=target.nearby(2.0, 1), gamma=4)
    assert near.values_per_pass > far.values_per_pass > 1


def test_what_has_no_exact_density_asks_for_consent() -> None:
    @dataclass(frozen=True)
    class Inexact(_Soft):
        exact = False

    law = Inexact(WIDE)
    x = draw(law, 0, 0)[None]
    with pytest.raises(SettingsError, match="surrogate=True"):
        DensityRatio().choose(x, [law, law], [law], 0, 0)
    assert DensityRatio(surrogate=True).choose(x, [law, law], [law], 0, 0).accepted == 1


def test_a_diffusion_head_draws_from_about_its_mixture() -> None:
    drawn = Diffusion(NARROW, steps=200).sample(uniforms(0, 0, 0, 4000, 2 * 201, noise.TOKEN))
    assert np.abs(np.sort(_cdf(NARROW, drawn[:, 0])) - np.linspace(0, 1, 4000)).max() < 0.04
    # The last step along the noise of a draw is where that draw came from.
    head, given = Diffusion(NARROW), uniforms(1, 0, 0, 1, 22, noise.TOKEN)
    assert head.along(given[0]).sample(given[:, -2:]) == pytest.approx(head.sample(given))


def test_trajectories_that_share_noise_agree_more_often() -> None:
    target = MixtureChain.random(1, 2, seed=1)
    heads = DiffusionChain(target), DiffusionChain(target.nearby(0.5, seed=2))
    shared, apart = DensityRatio(surrogate=True), Apart(surrogate=True)
    runs = [generate_values(heads[0], 150, 1, drafter=heads[1], acceptance_rule=rule) for rule in (shared, apart)]
    assert runs[0].accepted / runs[0].drafted > runs[1].accepted / runs[1].drafted + 0.1
    same = generate_values(heads[0], 50, 1, drafter=heads[0], acceptance_rule=shared)
    assert same.accepted == same.drafted


@dataclass(frozen=True)
class Apart(DensityRatio):
    """Lets the target's trajectory have noise of its own."""

    def _pair(self, p: Density, q: Density, seed: int, position: int) -> tuple[Density, Density]:
        return super()._pair(p, q, seed + 1, position)[0], super()._pair(p, q, seed, position)[1]


def test_bad_settings_are_refused() -> None:
    target = MixtureChain.random(1, 1, seed=0)
    with pytest.raises(SettingsError, match="tries >= 1"):
        DensityRatio(tries=0)
    with pytest.raises(UnknownMethod, match="rejection is a acceptance-rule method"):
        generate_values(target, 3, 1, acceptance_rule="rejection")
    with pytest.raises(SettingsError, match="gamma >= 1"):
        generate_values(target, 3, 1, gamma=0)
    with pytest.raises(SettingsError, match="must be an acceptance rule of tokens"):
        Request([1], acceptance_rule=DensityRatio())  # type: ignore[arg-type]
