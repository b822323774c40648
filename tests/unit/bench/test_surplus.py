"""What drafters can gain by a hidden state: identities and inequalities, on sources that can be enumerated."""

from __future__ import annotations

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery_benchmarks.surplus import (
    Surplus,
    categorical_entropy,
    conditional_information,
    entropy,
    floor,
    information,
    of_chain,
    stationary,
)


def chain(random: np.random.Generator, n: int = 4, sharp: float = 1.0) -> np.ndarray:
    """A random source of second order."""
    found: np.ndarray = random.dirichlet(np.full(n, sharp), size=(n, n))
    return found


def test_the_entropy_of_a_head_is_shannons_by_copying() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        p = random.dirichlet(np.full(7, 0.5))
        assert categorical_entropy(p) == pytest.approx(entropy(p), abs=1e-10)
        assert abs(categorical_entropy(p) - entropy(p**2 / (p**2).sum())) > 1e-4


def test_the_surplus_is_what_a_state_tells_beyond_the_next_token() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        transition = chain(random, 5)
        pairs = stationary(transition)
        assert pairs.sum(axis=0) == pytest.approx(pairs.sum(axis=1), abs=1e-12)
        # P(h, w, v, u): the token before as state, and the three that follow it.
        whole = pairs[:, :, None, None] * transition[..., None] * transition[None]
        flat = whole.reshape(5, 5, 25)
        surplus = conditional_information(flat)
        assert information(whole.reshape(5, 125)) == pytest.approx(
            information(whole.sum(axis=(2, 3))) + surplus, abs=1e-10
        )
        of_later = entropy(flat.sum(axis=0)) - entropy(flat.sum(axis=(0, 2)))
        assert -1e-12 <= surplus <= of_later <= 2 * np.log(5)


def test_a_source_of_first_order_leaves_nothing_to_a_state() -> None:
    random = np.random.default_rng(2)
    first = random.dirichlet(np.ones(4), size=4)
    found = Surplus.of(of_chain(np.broadcast_to(first[None], (4, 4, 4))), np.arange(4))
    assert (found.told, found.whole) == (pytest.approx(0.0, abs=1e-12),) * 2
    assert found.token == pytest.approx(1.0) and found.hidden == pytest.approx(1.0)


@pytest.mark.parametrize("n", [3, 4])
def test_the_inequalities_hold_and_tighter_ones_do_not(n: int) -> None:
    random = np.random.default_rng(n)
    broken = 0
    for _ in range(500):
        joint = of_chain(chain(random, n, sharp=float(random.choice([0.1, 1.0, 5.0]))))
        whole, lossy = Surplus.of(joint, np.arange(n)), Surplus.of(joint, np.arange(n) % 2)
        # The token before is all there is to know; its last bit is less.
        assert whole.told == pytest.approx(whole.whole) and whole.hidden == pytest.approx(1.0)
        assert 0 < lossy.told < lossy.whole == pytest.approx(whole.whole)
        for found in (whole, lossy):
            assert found.token >= found.token_floor - 1e-12 and found.hidden >= found.hidden_floor - 1e-12
            assert found.token <= found.hidden + 1e-12
        # Half of the distance would promise too much, somewhere.
        broken += lossy.token < floor(lossy.whole / 4)
    assert broken > 10


def test_what_is_no_source_is_refused() -> None:
    with pytest.raises(SettingsError, match="sum to 1"):
        Surplus.of(np.ones((2, 3, 3)), np.arange(2))
