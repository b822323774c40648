"""Estimators over a pool are means over all of its subsets, and follow the closed forms."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.search.estimators import best_of, pass_at

SCORES = [0.5, 0.1, 0.5, 0.9, 0.1, 0.9, 0.3]
RIGHT = [1, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("n", range(1, 8))
def test_they_are_means_over_all_subsets(n: int) -> None:
    subsets = list(combinations(range(7), n))
    assert pass_at(n, sum(RIGHT), 7) == pytest.approx(np.mean([any(RIGHT[i] for i in subset) for subset in subsets]))

    def best(subset: tuple[int, ...]) -> float:
        top = max(SCORES[i] for i in subset)
        return float(np.mean([RIGHT[i] for i in subset if SCORES[i] == top]))

    assert best_of(n, SCORES, RIGHT) == pytest.approx(np.mean([best(subset) for subset in subsets]))
    # The usual plug-in estimate is biased, and shows.
    assert n == 1 or pass_at(n, 4, 7) != pytest.approx(1 - (3 / 7) ** n)


@pytest.mark.parametrize("n", range(1, 8))
def test_the_laws_of_the_best_of_n(n: int) -> None:
    # A perfect verifier finds what can be found, a constant one is chance, and only the order of scores counts.
    assert best_of(n, RIGHT, RIGHT) == pytest.approx(pass_at(n, sum(RIGHT), 7), abs=1e-15)
    assert best_of(n, [0.2] * 7, RIGHT) == pytest.approx(sum(RIGHT) / 7)
    assert best_of(n, [math.exp(score) for score in SCORES], RIGHT) == best_of(n, SCORES, RIGHT)
    assert n not in (2, 3) or best_of(n, [-score for score in SCORES], RIGHT) != best_of(n, SCORES, RIGHT)


def test_a_chain_of_steps_is_solved_as_often_as_it_should_be() -> None:
    # Eight steps, each wrong with probability 0.1, as in the closed forms of scripted chains.
    chance = np.random.default_rng(0)
    problems = (chance.random((2000, 16, 8)) >= 0.1).all(axis=2).sum(axis=1)
    one = 0.9**8
    for n in (1, 2, 4, 8):
        found = np.array([pass_at(n, int(right), 16) for right in problems])
        assert abs(found.mean() - (1 - (1 - one) ** n)) < 4 * found.std() / math.sqrt(2000)


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [((100, 20), (140, 20), (0.50, 0.72, 0.88, 0.96, 0.98)), ((100, 10), (110, 40), (0.50, 0.55, 0.45, 0.27, 0.11))],
)
def test_the_shortest_is_right_as_often_as_lengths_tell(right, wrong, expected) -> None:
    """First-finish gains where right texts are shorter, and loses where wrong ones vary more."""
    chance = np.random.default_rng(1)
    lengths = np.concatenate([chance.normal(*right, 2000), chance.normal(*wrong, 2000)]).clip(min=1)
    for n, share in zip((1, 2, 4, 8, 16), expected, strict=True):
        assert best_of(n, (-lengths).tolist(), [1] * 2000 + [0] * 2000) == pytest.approx(share, abs=0.03)


def test_pools_that_are_too_small_are_named() -> None:
    for wrong in (
        lambda: pass_at(0, 1, 4),
        lambda: pass_at(5, 1, 4),
        lambda: pass_at(1, 5, 4),
        lambda: best_of(3, [1.0, 2.0], [1, 0]),
        lambda: best_of(1, [math.nan], [1]),
    ):
        with pytest.raises(SettingsError):
            wrong()
