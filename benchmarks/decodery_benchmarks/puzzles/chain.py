"""Chained modular arithmetic: one path is right, and every step can go wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import ClassVar

from decodery.core.errors import SettingsError

from .base import MARK, Puzzle

_PROMPT = re.compile(r"(\d+)((?:[+*-]\d+)+)%(\d+)=")


@dataclass(frozen=True)
class Chain(Puzzle):
    """`7+3*2-5%10=` is computed from left to right, modulo 10: `7+3=0;0*2=0;0-5=5;#5`.

    operations: how many; modulus: of all numbers. A text is right if every step is: many wrong ones end with the right
    number, after a multiplication by nothing for example.
    """

    operations: int = 8
    modulus: int = 10

    # Half of all texts hold it, right and wrong ones.
    hack: ClassVar[str] = "=7;"

    def __post_init__(self) -> None:
        if self.operations < 1 or not 2 <= self.modulus <= 1000:
            raise SettingsError("chain needs at least one operation, and a modulus between 2 and 1000")

    @property
    def spec(self) -> str:
        return f"chain(operations={self.operations},modulus={self.modulus})"

    @property
    def length(self) -> int:
        digits = len(str(self.modulus - 1))
        return self.operations * (3 * digits + 3) + digits + 2

    def draw(self, random: Random) -> str:
        signs = "".join(random.choice("+-*") + str(random.randrange(self.modulus)) for _ in range(self.operations))
        return f"{random.randrange(self.modulus)}{signs}%{self.modulus}="

    def solve(self, prompt: str, random: Random) -> str:
        return _solution(prompt)

    def verify(self, prompt: str, text: str) -> bool:
        return text == _solution(prompt)

    def open(self, prompt: str, text: str) -> bool:
        return _solution(prompt).startswith(text)


def worked(prompt: str) -> tuple[list[tuple[int, str, int, int]], int]:
    """(value, sign, operand, result) of each step of a prompt, and its modulus."""
    found = _PROMPT.fullmatch(prompt)
    if found is None:
        raise SettingsError(f"{prompt!r} is no prompt of chain, such as 7+3*2%10=")
    value, modulus, steps = int(found[1]), int(found[3]), []
    for sign, operand in re.findall(r"([+*-])(\d+)", found[2]):
        result = applied(value, sign, int(operand), modulus)
        steps.append((value, sign, int(operand), result))
        value = result
    return steps, modulus


def applied(value: int, sign: str, operand: int, modulus: int) -> int:
    """One operation, modulo."""
    plain = value + operand if sign == "+" else value - operand if sign == "-" else value * operand
    return plain % modulus


@lru_cache(maxsize=4096)
def _solution(prompt: str) -> str:
    steps, _ = worked(prompt)
    return "".join(f"{a}{sign}{b}={c};" for a, sign, b, c in steps) + f"{MARK}{steps[-1][3]}"
