"""Options of `decodery train` as they are made from dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest

from decodery.cli.train_options import descriptions, given, parameters


@dataclass(frozen=True)
class First:
    """What comes first.

    Attributes:
        bits: Bits of a weight,
            at most eight.
        low, high: An edge.
    """

    bits: Literal[2, 4] = 4
    low: int = 0
    high: float | None = None
    steps: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Second(First):
    """What comes second.

    Attributes:
        high: The upper edge.
    """

    layers: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = field(default=("a", "b"), metadata={"option": "--name"})
    files: tuple[Path, ...] = field(default=(), metadata={"argument": True})
    reset: bool = True
    plain: bool = field(default=True, metadata={"option": "--no-plain"})


def read(*arguments: str) -> tuple[Any, ...]:
    settings = (First(), Second(seed=5))
    found: dict[str, Any] = {}
    params = parameters(settings, ("steps",))
    command = click.Command("x", params=params, callback=lambda **values: found.update(values))
    command.main([*arguments, __file__], standalone_mode=False)
    return given(settings, found)


def test_help_is_what_docstrings_say_of_attributes() -> None:
    said = descriptions(Second)
    assert said["bits"] == "Bits of a weight, at most eight." and said["low"] == "An edge."
    assert said["high"] == "The upper edge." and "seed" not in said
    options = {each.name: each for each in parameters((First(), Second()), ("low",)) if isinstance(each, click.Option)}
    assert options["seed"].help == "Random seed." and "low" not in options
    assert options["layers"].show_default == "1/2" and not options["high"].show_default


def test_values_become_those_of_the_dataclasses() -> None:
    first, second = read()
    assert (first, second) == (First(), Second(seed=0, files=(Path(__file__),)))
    first, second = read("--bits", "2", "--layers", "3/4", "--name", "c,d", "--name", "e", "--no-reset", "--no-plain")
    # A name belongs to the first that has it.
    assert (first.bits, second.bits, second.layers, second.names) == (2, 4, (3, 4), ("c", "d", "e"))
    assert (second.reset, second.plain) == (False, False)
    first, second = read("--seed", "7", "--high", "1.5")
    assert (first.seed, second.seed, first.high, second.high) == (7, 7, 1.5, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bits", "3"), "3 is not one of 2, 4"),
        (("--layers", "1/x"), "1/x is not a list of integers"),
        (("--seed", "-1"), "-1 is not an integer from 0"),
    ],
)
def test_other_values_are_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        read(*arguments)
