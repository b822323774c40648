"""Puzzles by name, with their settings: `chain:operations=12,modulus=23`."""

from __future__ import annotations

import dataclasses
import typing

from decodery.core.errors import SettingsError
from decodery.core.method_spec import given, parts

from .base import Puzzle
from .chain import Chain
from .countdown import Countdown
from .direct_chain import DirectChain
from .dyck import Dyck
from .kvhop import KVHop
from .prog import Prog
from .retry_chain import RetryChain
from .robot import Robot

PUZZLES: dict[str, type[Puzzle]] = {
    "chain": Chain,
    "direct-chain": DirectChain,
    "countdown": Countdown,
    "dyck": Dyck,
    "retry-chain": RetryChain,
    "robot": Robot,
    "prog": Prog,
    "kvhop": KVHop,
}


def puzzle(spec: str | Puzzle) -> Puzzle:
    """The puzzle that a text names; raises SettingsError for what is none."""
    if isinstance(spec, Puzzle):
        return spec
    name, settings = parts(spec)
    cls = PUZZLES.get(name)
    if cls is None:
        raise SettingsError(f"there is no puzzle {name!r}: choose among {', '.join(PUZZLES)}")
    kinds = typing.get_type_hints(cls)
    values = given(name, settings, {field.name: kinds[field.name] for field in dataclasses.fields(cls)})
    return cls(**values)
