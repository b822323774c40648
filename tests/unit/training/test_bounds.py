"""Settings are refused outside of their bounds, by name and value, and edges belong to them as their brackets say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from decodery.core.errors import SettingsError
from decodery.training.kind import NON_NEGATIVE, Bounded, Run, bounded, kind


@dataclass(frozen=True)
class Recipe(Bounded):
    share: float = bounded(0.5, "[0, 1)")
    rate: float = bounded(0.5, "(0, 1]")
    weight: float = bounded(1.0, NON_NEGATIVE)
    steps: int = 3
    epochs: float = bounded(1.0, NON_NEGATIVE)
    free: float = -1.0


@dataclass(frozen=True)
class Longer(Recipe):
    share: float = bounded(1.0, "[0, 1]")


@pytest.mark.parametrize(
    ("name", "value"),
    [("share", 0), ("share", 0.99), ("rate", 1), ("rate", 1e-9), ("weight", 0), ("weight", 1e9), ("steps", 1)],
)
def test_values_within_their_bounds_are_taken(name: str, value: float) -> None:
    assert getattr(Recipe(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share", 1), ("share", -1e-9), ("rate", 0), ("rate", 1.01), ("weight", -1), ("weight", math.inf),
        ("weight", math.nan), ("steps", 0), ("epochs", -0.5),
    ],
)  # fmt: skip
def test_others_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is {value}: give one in [\[(].*[\])]$"):
        Recipe(**{name: value})  # type: ignore[arg-type]


def test_bounds_of_a_field_take_the_place_of_usual_and_of_inherited_ones() -> None:
    assert Recipe(epochs=0).epochs == 0 and Longer().share == 1.0
    with pytest.raises(SettingsError, match="steps is 0"):
        Longer(steps=0)


def test_two_kinds_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodery.training.kind.KINDS", {})

    def first_kind(run: Run) -> None:
        """The first."""

    kind("", (), "")(first_kind)

    def _first_kind(run: Run) -> None:
        """Another, whose command would be the same."""

    with pytest.raises(ValueError, match=r"^first-kind is a kind already, of "):
        kind("", (), "")(_first_kind)
