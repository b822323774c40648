"""JLCM: what is found again of planted values and choices, and what learning never loses."""

from __future__ import annotations

import pytest
import torch

from decodery.compression.jlcm import JLCM, Coded, grouped
from decodery.core.errors import SettingsError
from decodery.models.torch.weights import Dense

GROUP = torch.arange(24) % 2


def planted(seed: int) -> tuple[Coded, Coded, torch.Tensor]:
    """A matrix of two groups of eight values each, the same with other values and 30 % other choices, and a gram."""
    draws = torch.Generator().manual_seed(seed)
    values = torch.linspace(-2, 2, 8).double() * torch.tensor([[1.0], [0.5]]).double()
    choice = torch.randint(0, 8, (24, 32), generator=draws)
    rows = torch.randn(200, 32, generator=draws).double()
    others = torch.randint(0, 8, (24, 32), generator=draws)
    begun = torch.where(torch.rand(24, 32, generator=draws) < 0.3, others, choice)
    return Coded(values, GROUP, choice), Coded(values * 1.05, GROUP, begun), rows.T @ rows


def test_planted_choices_are_found_where_near_values_move_first() -> None:
    for seed in range(5):
        right, begun, gram = planted(seed)
        near, far = (JLCM(steps=400, proximal=each).learned(right.weight, gram, begun) for each in (True, False))
        assert (near.choice == right.choice).double().mean() >= 0.99
        # The plain gradient jumps over what is near.
        assert (far.choice == right.choice).double().mean() < 0.9
        assert torch.allclose(near.values, right.values, atol=0.03)


def test_learning_never_loses_and_is_told_at_its_size() -> None:
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=draws).double() * torch.linspace(0.2, 2, 48)[:, None]
    rows = torch.randn(300, 64, generator=draws).double() @ torch.randn(64, 64, generator=draws).double()
    gram = rows.T @ rows

    def lost(dense: torch.Tensor) -> float:
        return float((((dense - weight) @ gram) * (dense - weight)).sum())

    begun = JLCM(bits=2, steps=0).linear(Dense(weight), gram, 4)
    made = JLCM(bits=2).linear(Dense(weight), gram, 4)
    assert lost(made.linear.weight) < 0.7 * lost(begun.linear.weight)
    group = grouped(weight, 4)
    for number in range(4):
        assert len(made.linear.weight[group == number].unique()) <= 4
    assert made.size.bytes == (2 * 48 * 64 + 4 * 32 * 2**2 + 2 * 48) / 8
    # Rows of one size are told apart from others, and one group alone knows less.
    assert len(group.unique()) == 4 and group[weight.norm(dim=1).argmax()] != group[weight.norm(dim=1).argmin()]
    assert lost(JLCM(bits=2, steps=0, groups=1).linear(Dense(weight), gram, 4).linear.weight) > lost(
        begun.linear.weight
    )


def test_equal_weights_and_bad_settings() -> None:
    same = JLCM(steps=5).linear(Dense(torch.full((4, 8), 0.5)), torch.eye(8).double(), 4)
    assert torch.equal(same.linear.weight, torch.full((4, 8), 0.5))
    zero = JLCM(steps=5).linear(Dense(torch.zeros(4, 8)), torch.eye(8).double(), 4)
    assert not zero.linear.weight.any()
    for bad in ({"bits": 0}, {"bits": 6}, {"groups": 0}, {"steps": -1}, {"lr": 0.0}):
        with pytest.raises(SettingsError, match="jlcm needs"):
            JLCM(**bad)  # type: ignore[arg-type]
