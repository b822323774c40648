"""Facts in any order, and a question that follows several of them: what long contexts are for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from decodery.core.errors import SettingsError

from .base import MARK, Puzzle

_NAME = 2
"""Letters of a name."""
_FACT = re.compile(r"([a-z]{2})=([a-z]{2});")
_PROMPT = re.compile(r"((?:[a-z]{2}=[a-z]{2};)+)([a-z]{2})>(\d)=")


@dataclass(frozen=True)
class KVHop(Puzzle):
    """`cd=ef;xy=cd;ab=cd;ab>2=` asks what two hops from ab lead to: `ab=cd;cd=ef;#ef`. Every hop must be right.

    facts: in the prompt, in any order, each of a name of its own; hops: of them that lead to the answer. Others end at
    names of the same facts, as likely as not, so that a wrong hop can be gone on from.
    """

    facts: int = 16
    hops: int = 2

    # Some names begin by it.
    hack: ClassVar[str] = "=e"
    pattern: ClassVar[str] = rf"{MARK}([a-z]+)$"

    def __post_init__(self) -> None:
        if not 1 <= self.hops <= 9 or not self.hops <= self.facts <= 400:
            raise SettingsError("kvhop has 1 to 9 hops, and as many facts or more, up to 400")

    @property
    def spec(self) -> str:
        return f"kvhop(facts={self.facts},hops={self.hops})"

    @property
    def length(self) -> int:
        return self.hops * (2 * _NAME + 2) + _NAME + 2

    def draw(self, random: Random) -> str:
        every = [first + second for first in ascii_lowercase for second in ascii_lowercase]
        names = random.sample(every, min(2 * self.facts + 1, len(every)))
        keys, ends = names[: self.facts], names[self.facts :]
        found = {key: random.choice(keys if random.random() < 0.5 else ends) for key in keys}
        way = [*keys[: self.hops], random.choice(ends)]
        found |= dict(pairwise(way))
        facts = [f"{key}={value};" for key, value in found.items()]
        random.shuffle(facts)
        return f"{''.join(facts)}{way[0]}>{self.hops}="

    def solve(self, prompt: str, random: Random) -> str:
        known, name, hops = given(prompt)
        text = ""
        for _ in range(hops):
            if name not in known:
                raise SettingsError(f"the facts of {prompt!r} do not lead so far")
            text, name = f"{text}{name}={known[name]};", known[name]
        return f"{text}{MARK}{name}"

    def verify(self, prompt: str, text: str) -> bool:
        return text == self.solve(prompt, Random(0))

    def open(self, prompt: str, text: str) -> bool:
        return self.solve(prompt, Random(0)).startswith(text)


def given(prompt: str) -> tuple[dict[str, str], str, int]:
    """The facts of a prompt, where its question begins, and how many hops it asks for. Raises SettingsError."""
    found = _PROMPT.fullmatch(prompt)
    if found is None:
        raise SettingsError(f"{prompt!r} is no prompt of kvhop, such as cd=ef;ab=cd;ab>2=")
    return dict(_FACT.findall(found[1])), found[2], int(found[3])
