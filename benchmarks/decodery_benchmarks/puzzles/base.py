"""What a puzzle is: prompts that are drawn, solutions, and who says whether one is right."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from decodery.core.errors import SettingsError

SPLITS = {"test": (0,), "validation": (1,), "reward": (2,), "router": (3,), "train": (4, 5, 6, 7, 8, 9)}
"""The hashes of prompts, modulo 10, that belong to each: no prompt is in two of them."""

END = "$"
"""What ends a text, as a token of its own."""
MARK = "#"
"""Stands before an answer."""
_PATIENCE = 10_000


@dataclass(frozen=True)
class Puzzle(ABC):
    """A kind of puzzle; fields say how hard. Texts are of `alphabet.ALPHABET` alone, one token a character.

    delimiter: what ends a step, "" where there are none. pattern: a regular expression that finds the answer in a text,
    for votes. hack: a short text that some right solutions hold and that says nothing of their being right. length: the
    most tokens a solution has, its end included; room: of any text, wrong ones included.
    """

    delimiter: ClassVar[str] = ";"
    pattern: ClassVar[str] = rf"{MARK}(\d+)$"
    hack: ClassVar[str] = ""

    @property
    @abstractmethod
    def length(self) -> int: ...

    @property
    @abstractmethod
    def spec(self) -> str:
        """The puzzle as a text, with settings in parentheses, so that it may stand inside another one's."""

    @abstractmethod
    def draw(self, random: Random) -> str:
        """A prompt."""

    @abstractmethod
    def solve(self, prompt: str, random: Random) -> str:
        """A text as models learn to write it, without its end; where there are several, one at random."""

    @abstractmethod
    def verify(self, prompt: str, text: str) -> bool:
        """Whether a finished text is right."""

    @abstractmethod
    def open(self, prompt: str, text: str) -> bool:
        """Whether an ideal solver could still end rightly after this beginning."""

    def passed(self, prompt: str, text: str) -> float:
        """How much of a finished text is right by what its prompt shows; where that shows nothing, whether it is."""
        return float(self.verify(prompt, text))

    def remark(self, prompt: str, text: str) -> str:
        """What is wrong with a finished text by what its prompt shows, as models learn to read it; "" for nothing."""
        return ""

    def steps(self, text: str) -> list[str]:
        """The steps of a text, each with its delimiter; what stands after the last one is a step of its own."""
        if not self.delimiter:
            return [text] if text else []
        pieces = text.split(self.delimiter)
        return [piece + self.delimiter for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])

    def labels(self, prompt: str, text: str) -> list[bool]:
        """[steps] whether an ideal solver could still end rightly after each step; the last one is as the text is."""
        found, written = [], ""
        for step in self.steps(text):
            written += step
            found.append(self.open(prompt, written))
        if found:
            found[-1] = self.verify(prompt, text)
        return found


def split_of(prompt: str) -> str:
    """Which split a prompt belongs to."""
    number = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "little") % 10
    return next(name for name, numbers in SPLITS.items() if number in numbers)


def drawn(puzzle: Puzzle, split: str, seed: int = 0) -> Iterator[str]:
    """Prompts of a split, no two alike, without end. Raises SettingsError where no further one is found."""
    if split not in SPLITS:
        raise SettingsError(f"there is no split {split!r} of puzzles: choose among {', '.join(SPLITS)}")
    random, seen = Random(f"{puzzle!r} {split} {seed}"), set[str]()
    while True:
        for _ in range(_PATIENCE):
            prompt = puzzle.draw(random)
            if prompt not in seen and split_of(prompt) == split:
                break
        else:
            raise SettingsError(
                f"{puzzle.spec} has only {len(seen)} prompts in {split}: ask for fewer, or make it harder"
            )
        seen.add(prompt)
        yield prompt
