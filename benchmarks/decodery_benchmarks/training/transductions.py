"""Sources and what is to be written of them, made by code: what small encoder-decoder models learn and are tried on."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from decodery.core.errors import SettingsError
from decodery_benchmarks.puzzles.base import SPLITS, split_of

_SHIFT = 13


@dataclass(frozen=True)
class Transduction(ABC):
    """A kind of source.

    Texts are of the puzzles' alphabet, one token a character.

    Attributes:
        cut: Whether the beginning of a source is a source, too, so that models can learn to write while one arrives.
        longest: Of what is written, in tokens without the end.
    """

    cut: ClassVar[bool] = False
    longest: ClassVar[int] = 16

    @abstractmethod
    def draw(self, random: Random) -> str:
        """A source."""

    @abstractmethod
    def write(self, source: str) -> str:
        """What is to be written of it."""


@dataclass(frozen=True)
class Reorder(Transduction):
    """Letters are written thirteen places on in the alphabet.

    A digit k turns the k letters right before it around. What the last letters become depends on what comes after them,
    three tokens at most: a writer while the source arrives has to wait, or to take back.

    Attributes:
        turns: The share of places that hold a digit.
        most, least: Tokens of a source.
    """

    turns: float = 0.2
    least: int = 8
    most: int = 16

    cut = True
    longest = 16

    def draw(self, random: Random) -> str:
        length, source, since = random.randint(self.least, self.most), "", 0
        while len(source) < length:
            if since > 1 and random.random() < self.turns:
                source, since = source + str(random.randint(2, min(3, since))), 0
            else:
                source, since = source + random.choice(ascii_lowercase), since + 1
        return source

    def write(self, source: str) -> str:
        found: list[str] = []
        for sign in source:
            if sign.isdigit():
                found[-int(sign) :] = found[-int(sign) :][::-1]
            else:
                found.append(ascii_lowercase[(ascii_lowercase.index(sign) + _SHIFT) % 26])
        return "".join(found)


_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_ONES += " seventeen eighteen nineteen"
_SMALL = _ONES.split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905
_WORDS = ["light", "river", "stone", "cold", "amber", "quiet", "north", "field", "glass", "yellow", "open", "valley"]


@dataclass(frozen=True)
class Normalise(Transduction):
    """Dates, numbers and times in words become figures, and names their first letters.

    `3 may 1988` is `1988-05-03`.
    """

    longest = 10

    def draw(self, random: Random) -> str:
        kind = random.randrange(4)
        if kind == 0:
            return f"{random.randint(1, 28)} {random.choice(_MONTHS)} {random.randint(1900, 2099)}"
        if kind == 1:
            return _spelt(random.randint(1, 9999))
        if kind == 2:
            return f"{random.choice(('half past', 'quarter past', 'quarter to'))} {_SMALL[random.randint(1, 12)]}"
        return "short: " + " ".join(random.choices(_WORDS, k=random.randint(2, 6)))

    def write(self, source: str) -> str:
        if (date := re.fullmatch(r"(\d+) ([a-z]+) (\d{4})", source)) is not None:
            return f"{date[3]}-{_MONTHS.index(date[2]) + 1:02}-{int(date[1]):02}"
        if (time := re.fullmatch(r"(half past|quarter past|quarter to) ([a-z]+)", source)) is not None:
            hour = _SMALL.index(time[2]) - (time[1] == "quarter to")
            return f"{hour or 12:02}:{({'half past': 30, 'quarter past': 15}).get(time[1], 45)}"
        if source.startswith("short: "):
            return "".join(word[0] for word in source.removeprefix("short: ").split())
        return str(_number(source.split()))


def _spelt(number: int) -> str:
    thousands, hundreds, rest = number // 1000, number // 100 % 10, number % 100
    words = [_SMALL[thousands], "thousand"] if thousands else []
    words += [_SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words += [_TENS[rest // 10 - 2], *([_SMALL[rest % 10]] if rest % 10 else [])]
    elif rest:
        words.append(_SMALL[rest])
    return " ".join(words)


def _number(words: list[str]) -> int:
    total = last = 0
    for word in words:
        if word in ("thousand", "hundred"):
            total += last * (1000 if word == "thousand" else 100)
            last = 0
        else:
            last += _SMALL.index(word) if word in _SMALL else 10 * (_TENS.index(word) + 2)
    return total + last


TRANSDUCTIONS: dict[str, Transduction] = {"reorder": Reorder(), "normalise": Normalise()}


def transduction(name: str) -> Transduction:
    """The one of this name.

    Raises:
        SettingsError: For any other.
    """
    if name not in TRANSDUCTIONS:
        raise SettingsError(f"there is no transduction {name!r}: choose among {', '.join(TRANSDUCTIONS)}")
    return TRANSDUCTIONS[name]


def sources(kind: Transduction, split: str, seed: int = 0) -> Iterator[str]:
    """Sources of a split without end; none is in two splits."""
    assert split in SPLITS
    random = Random(f"{kind!r} {split} {seed}")
    while True:
        source = kind.draw(random)
        if split_of(source) == split:
            yield source
