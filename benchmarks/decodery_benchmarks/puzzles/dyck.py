"""Brackets of three kinds that have to be closed in time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from decodery.core.errors import SettingsError

from .base import Puzzle

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_PROMPT = re.compile(r"(\d{1,4}):([()\[\]{}]*)=")


@dataclass(frozen=True)
class Dyck(Puzzle):
    """`12:([{=` is to be completed to balanced brackets of at most 12 signs: `}])`. Every dead end can be told.

    most: the largest limit.
    """

    most: int = 24

    delimiter: ClassVar[str] = ""
    pattern: ClassVar[str] = r"^(.*)$"
    hack: ClassVar[str] = "()"

    def __post_init__(self) -> None:
        if not 4 <= self.most <= 999:
            raise SettingsError("dyck needs room for 4 to 999 brackets")

    @property
    def spec(self) -> str:
        return f"dyck(most={self.most})"

    @property
    def length(self) -> int:
        return self.most + 1

    def draw(self, random: Random) -> str:
        limit = 2 * random.randint(2, self.most // 2)
        written = self._walk("", random.randint(1, limit // 2), limit, random)
        return f"{limit}:{written}="

    def solve(self, prompt: str, random: Random) -> str:
        limit, begun = _given(prompt)
        whole = self._walk(begun, limit, limit, random)
        return whole[len(begun) :]

    def verify(self, prompt: str, text: str) -> bool:
        limit, begun = _given(prompt)
        return len(begun + text) <= limit and _open(begun + text) == []

    def open(self, prompt: str, text: str) -> bool:
        limit, begun = _given(prompt)
        left = _open(begun + text)
        return left is not None and len(begun + text) + len(left) <= limit

    @staticmethod
    def _walk(text: str, length: int, limit: int, random: Random) -> str:
        """Brackets up to a length, so that those open can be closed within the limit; it ends early where none are."""
        while len(text) < length:
            left = _open(text) or []
            room = limit - len(text) - len(left) >= 2
            if not left and not room:
                break
            if room and (not left or random.random() < 0.4):
                text += random.choice("([{")
            else:
                text += _PAIRS[left[-1]]
                if len(left) == 1 and random.random() < 0.5 and length == limit:
                    break
        return text


def _given(prompt: str) -> tuple[int, str]:
    found = _PROMPT.fullmatch(prompt)
    if found is None:
        raise SettingsError(f"{prompt!r} is no prompt of dyck, such as 12:([=")
    return int(found[1]), found[2]


def _open(text: str) -> list[str] | None:
    """The brackets that are open, None where one is closed wrongly."""
    left: list[str] = []
    for sign in text:
        if sign in _PAIRS:
            left.append(sign)
        elif not left or _PAIRS[left.pop()] != sign:
            return None
    return left
