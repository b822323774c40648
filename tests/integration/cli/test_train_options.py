"""Options of `decodery train` as they are made from dataclasses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest

from decodery.cli.train import described_kind, index, kv, train
from decodery.cli.train_options import Parameter, described, descriptions, given, parameter


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
    plain: bool = field(default=True, metadata={"option": "--no-plain", "help": "Write as it is."})


def parameters(settings: tuple[Any, ...], without: tuple[str, ...]) -> list[click.Parameter]:
    """The parameters of a command, of what the static index has of them."""
    stored = json.loads(json.dumps([each.as_dict() for each in described(settings, without)]))
    return [parameter(Parameter.of(each)) for each in stored]


def read(*arguments: str) -> tuple[Any, ...]:
    settings = (First(), Second(seed=5))
    found: dict[str, Any] = {}
    params = parameters(settings, ("steps",))
    command = click.Command("x", params=params, callback=lambda **values: found.update(values))
    command.main([*arguments, __file__], standalone_mode=False)
    return given(settings, found)


def test_help_is_what_fields_and_docstrings_say_of_attributes() -> None:
    said = descriptions(Second)
    assert said["bits"] == "Bits of a weight, at most eight." and said["low"] == "An edge."
    assert said["high"] == "The upper edge." and "seed" not in said
    options = {each.name: each for each in parameters((First(), Second()), ("low",)) if isinstance(each, click.Option)}
    assert options["seed"].help == "Random seed." and "low" not in options
    assert options["plain"].help == "Write as it is."
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


def test_the_static_index_has_what_kinds_declare() -> None:
    names = {f"{group.path} {name}": (group, name) for group in (train, kv) for name in group.entries if name != "kv"}
    assert set(index()) == set(names)
    for path, (group, name) in names.items():
        declared = json.loads(json.dumps(described_kind(group.kind(name))))
        assert index()[path] == declared, f"{path} is out of date: run python tools/training_index.py"


def test_help_and_misuse_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from decodery.cli.main import cli\n"
        "for arguments in (['draft', '--help'], ['kv', 'lserve', '--help'], ['draft', '--layer', '2']):\n"
        "    try:\n"
        "        cli(['train', *arguments])\n"
        "    except SystemExit as left:\n"
        "        assert left.code == 2 * (arguments[-1] != '--help')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
