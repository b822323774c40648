"""Four numbers and a target: steps may be legal and lead nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import ClassVar

from decodery.core.errors import SettingsError

from .base import MARK, Puzzle

_MOST_NUMBERS = 5
_PROMPT = re.compile(rf"(\d{{1,9}}(?: \d{{1,9}}){{1,{_MOST_NUMBERS - 1}}})>(\d{{1,9}})=")
_STEP = re.compile(r"(\d{1,9})([-+*/])(\d{1,9})=(\d{1,9}) left ([\d ]{1,99});")

Move = tuple[int, str, int, int, tuple[int, ...]]
"""a, sign, b, what that gives, and the numbers that are left then, ascending."""


@dataclass(frozen=True)
class Countdown(Puzzle):
    """`3 5 6 9>24=`: two numbers at a time give a third, until the target is left: `9-5=4 left 3 4 6;...;#24`.

    numbers: how many, each from 1 to `most`; target: the largest. Numbers are whole and none is negative: a step that
    makes others is not legal. A text is right if all of its steps and lists are, and the target is what is left.
    """

    numbers: int = 4
    most: int = 13
    target: int = 30

    # Some solutions multiply by one, and so do attempts that lead nowhere.
    hack: ClassVar[str] = "*1="

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= _MOST_NUMBERS or self.most < 2 or self.target < 1:
            raise SettingsError("countdown needs 2 to 5 numbers, up to 2 or more, and a target of at least 1")

    @property
    def spec(self) -> str:
        return f"countdown(numbers={self.numbers},most={self.most},target={self.target})"

    @property
    def length(self) -> int:
        # A step holds at most three numbers and those left, none of more digits than their product.
        digits = len(str(self.most**self.numbers))
        return (self.numbers - 1) * (3 * digits + 9 + self.numbers * (digits + 1)) + digits + 2

    def draw(self, random: Random) -> str:
        while True:
            given = tuple(sorted(random.randint(1, self.most) for _ in range(self.numbers)))
            if within := [each for each in sorted(reachable(given)) if 1 <= each <= self.target]:
                return f"{' '.join(map(str, given))}>{random.choice(within)}="

    def solve(self, prompt: str, random: Random) -> str:
        left, target = _given(prompt)
        if target not in reachable(left):
            raise SettingsError(f"{prompt!r} has no solution in integers of at least 0")
        text = ""
        while len(left) > 1:
            a, sign, b, c, left = random.choice([move for move in moves(left) if target in reachable(move[-1])])
            text += f"{a}{sign}{b}={c} left {' '.join(map(str, left))};"
        return f"{text}{MARK}{target}"

    def verify(self, prompt: str, text: str) -> bool:
        steps, _, answer = text.rpartition(MARK)
        left, target = _given(prompt)
        return _after(left, steps) == (target,) and answer == str(target)

    def open(self, prompt: str, text: str) -> bool:
        """See `Puzzle.open`; of what stands after the last whole step an answer alone counts."""
        left, target = _given(prompt)
        ended = text.rfind(self.delimiter) + 1
        found = _after(left, text[:ended])
        if found is None or MARK not in text[ended:]:
            return found is not None and solvable(found, target)
        return found == (target,) and f"{MARK}{target}".startswith(text[ended:])


def solvable(left: tuple[int, ...], target: int) -> bool:
    """Whether these numbers, ascending, can still be brought to the target."""
    return target in reachable(left)


@lru_cache(maxsize=1 << 15)
def reachable(left: tuple[int, ...]) -> frozenset[int]:
    """All that can be made of these numbers, ascending, each used once."""
    if len(left) == 1:
        return frozenset(left)
    return frozenset().union(*(reachable(move[-1]) for move in moves(left)))


def moves(left: tuple[int, ...]) -> Iterator[Move]:
    """The legal steps, none twice: the larger number stands first."""
    seen = set()
    for low in range(len(left)):
        for high in range(low + 1, len(left)):
            b, a = left[low], left[high]
            if (a, b) in seen:
                continue
            seen.add((a, b))
            rest = left[:low] + left[low + 1 : high] + left[high + 1 :]
            for sign in "+-*/":
                if (c := _result(a, sign, b)) is not None:
                    yield a, sign, b, c, tuple(sorted((*rest, c)))


def _result(a: int, sign: str, b: int) -> int | None:
    """What comes of it, None for what is no integer from 0 on."""
    if sign == "+":
        return a + b
    if sign == "-":
        return a - b if a >= b else None
    if sign == "*":
        return a * b
    return a // b if b and a % b == 0 else None


def _given(prompt: str) -> tuple[tuple[int, ...], int]:
    found = _PROMPT.fullmatch(prompt)
    if found is None:
        raise SettingsError(f"{prompt!r} is no prompt of countdown, such as 3 5 6 9>24=")
    return tuple(sorted(map(int, found[1].split()))), int(found[2])


def _after(left: tuple[int, ...], steps: str) -> tuple[int, ...] | None:
    """The numbers that are left after whole steps, None where one is not legal."""
    at = 0
    while at < len(steps):
        step = _STEP.match(steps, at)
        if step is None:
            return None
        a, sign, b, c, shown = int(step[1]), step[2], int(step[3]), int(step[4]), step[5]
        rest = list(left)
        for each in (a, b):
            if each not in rest:
                return None
            rest.remove(each)
        left = tuple(sorted((*rest, c)))
        if _result(a, sign, b) != c or shown != " ".join(map(str, left)):
            return None
        at = step.end()
    return left
