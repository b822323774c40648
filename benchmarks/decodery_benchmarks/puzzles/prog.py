"""Programs for a stack machine that pass three examples: what is asked for is the shortest one that does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from typing import ClassVar

import numpy as np

from decodery.core.errors import SettingsError

from .base import Puzzle

DIGITS = tuple(f"push{digit}" for digit in range(10))
OPCODES = ("dup", "swap", "add", "sub", "mul", "neg", "drop", *DIGITS)
SHOWN, HIDDEN = 3, 5
_INPUTS = range(10)
_LARGEST = 999
_FAR = 10**6
"""An input at which no two programs give the same that are not the same polynomial: coefficients are far smaller."""
_BEGIN = (_FAR,)
_TOPPING = ("add", "sub", "mul", "neg", *DIGITS)
"""What a shortest program can end by: whatever else leaves on top what was there, or lay below, before."""
_PAIRS = r"(?:\d>-?\d{1,9};){2}\d>-?\d{1,9}\|"
_ATTEMPT = r"[^|]{0,400}\|"
_PROMPT = re.compile(rf"({_PAIRS})((?:{_ATTEMPT})*)")

Stack = tuple[int, ...]


@dataclass(frozen=True)
class Prog(Puzzle):
    """`1>3;4>6;5>7|` asks for a program that makes 3 of 1, 6 of 4 and 7 of 5: `push2 add.`

    The machine's stack holds the input; at the end what is on top counts. Every program is a polynomial of its input,
    and wanted is the one that the fewest opcodes give of all that pass the examples: a text is right if it passes these
    and five that are not shown. longest: opcodes of a program. Up to five no two functions agree on three examples,
    with six some do; all that there are of six take seconds to find, once in a process. attempts: prompts hold up to so
    many wrong programs, each with the first example that it fails: `1>3;4>6;5>7|dup add.!1>3 got 2|`; the last one is
    nearly right.
    """

    longest: int = 5
    attempts: int = 0

    delimiter: ClassVar[str] = " "
    pattern: ClassVar[str] = r"^(.*)\.$"
    # Many right programs begin by it, and so do wrong ones.
    hack: ClassVar[str] = "dup "

    def __post_init__(self) -> None:
        if not 1 <= self.longest <= 6 or not 0 <= self.attempts <= 8:
            raise SettingsError("prog has programs of 1 to 6 opcodes, and prompts with 0 to 8 attempts")

    @property
    def spec(self) -> str:
        return f"prog(longest={self.longest},attempts={self.attempts})"

    @property
    def length(self) -> int:
        return 6 * self.longest + 1

    def draw(self, random: Random) -> str:
        known = _known(self.longest)
        while True:
            number = random.choice(random.choice(known.by_length))
            inputs = sorted(random.sample(_INPUTS, SHOWN))
            pairs = tuple((x, int(known.values[number, x])) for x in inputs)
            fits = len({y for _, y in pairs}) > 1 and all(abs(y) <= _LARGEST for _, y in pairs)
            if fits and _wanted(pairs, self.longest) == number:
                break
        prompt = ";".join(f"{x}>{y}" for x, y in pairs) + "|"
        for left in range(random.randint(0, self.attempts), 0, -1):
            text = self._wrong(prompt, random, near=left == 1)
            prompt += f"{text}{self.remark(prompt, text)}|"
        return prompt

    def solve(self, prompt: str, random: Random) -> str:
        known = _known(self.longest)
        stack, name = random.choice(known.ends[known.far[self._number(prompt)]])
        program = [name]
        while stack != _BEGIN:
            stack, name = random.choice(known.before[stack])
            program.append(name)
        return " ".join(reversed(program)) + "."

    def verify(self, prompt: str, text: str) -> bool:
        values, shown = _known(self.longest).values[self._number(prompt)], [x for x, _ in _pairs(prompt)]
        program = self._program(text)
        hidden = [x for x in _INPUTS if x not in shown][:HIDDEN]
        return program is not None and all(_run(program, x) == values[x] for x in (*shown, *hidden))

    def open(self, prompt: str, text: str) -> bool:
        far = _known(self.longest).far[self._number(prompt)]
        if text.endswith("."):
            return self.verify(prompt, text)
        ended, _, begun = text.rpartition(self.delimiter)
        program = ended.split(self.delimiter) if ended else []
        left = self.longest - len(program)
        if left < 1 or text.startswith(self.delimiter):
            return not text
        stack = _stack(program, _FAR)
        if stack is None:
            return False
        nexts = [(name, after) for name, after in _nexts(stack) if name.startswith(begun)]
        return any(_reaches(after, left - 1, far) for _, after in nexts)

    def passed(self, prompt: str, text: str) -> float:
        """The share of the examples shown that a finished text passes."""
        program = self._program(text)
        return 0.0 if program is None else sum(_run(program, x) == y for x, y in _pairs(prompt)) / SHOWN

    def remark(self, prompt: str, text: str) -> str:
        """See `Puzzle.remark`: the first example that fails, and what the program gives there."""
        program = self._program(text)
        for x, y in _pairs(prompt):
            got = None if program is None else _run(program, x)
            if got != y:
                return f"!{x}>{y} got {'none' if got is None else got}"
        return ""

    def _number(self, prompt: str) -> int:
        found = _wanted(_pairs(prompt), self.longest)
        if found is None:
            raise SettingsError(f"no one shortest program of at most {self.longest} opcodes passes {prompt!r}")
        return found

    def _program(self, text: str) -> list[str] | None:
        """The opcodes of a finished text; None for what is none."""
        names = text[:-1].split(self.delimiter)
        return names if text.endswith(".") and len(names) <= self.longest and set(names) <= set(OPCODES) else None

    def _wrong(self, prompt: str, random: Random, near: bool) -> str:
        """A program that fails an example. near: but for one opcode it is a right one."""
        while True:
            names = self.solve(prompt, random)[:-1].split(self.delimiter)
            if near:
                names[random.randrange(len(names))] = random.choice(OPCODES)
            else:
                names = random.choices(OPCODES, k=random.randint(1, self.longest))
            text = " ".join(names) + "."
            if self.passed(prompt, text) < 1:
                return text


def _nexts(stack: Stack) -> Iterator[tuple[str, Stack]]:
    """Every opcode that this stack allows, with the stack after it."""
    for name in OPCODES:
        after = _step(stack, name)
        if after is not None:
            yield name, after


def _step(stack: Stack, name: str) -> Stack | None:
    """The stack after an opcode, None where it has too little on it."""
    if name in DIGITS:
        return (*stack, int(name[-1]))
    if not stack:
        return None
    *below, top = stack
    if name == "dup":
        return (*stack, top)
    if name == "neg":
        return (*below, -top)
    if name == "drop":
        return tuple(below)
    if not below:
        return None
    *rest, under = below
    if name == "swap":
        return (*rest, top, under)
    return (*rest, under + top if name == "add" else under - top if name == "sub" else under * top)


def _stack(program: list[str], given: int) -> Stack | None:
    stack: Stack | None = (given,)
    for name in program:
        stack = _step(stack, name) if stack is not None and name in OPCODES else None
    return stack


def _run(program: list[str], given: int) -> int | None:
    """What a program makes of its input, None where the stack holds too little."""
    stack = _stack(program, given)
    return stack[-1] if stack else None


@dataclass(frozen=True)
class _Known:
    """All functions that programs of at most so many opcodes compute, by number.

    far: what they make of `_FAR`; values: [functions, 10] of the inputs; by_length: their numbers by how many opcodes
    they need, from one on. ends: by `far`, the last opcodes of shortest programs with the stacks they find; before: by
    stack, the same of the ways to it.
    """

    far: list[int]
    values: np.ndarray
    needed: np.ndarray
    by_length: list[list[int]]
    ends: dict[int, list[tuple[Stack, str]]]
    before: dict[Stack, list[tuple[Stack, str]]]


@cache
def _known(longest: int) -> _Known:
    lengths, ends = dict[int, int](), dict[int, list[tuple[Stack, str]]]()
    steps: dict[Stack, int] = {_BEGIN: 0}
    before = dict[Stack, list[tuple[Stack, str]]]()
    level: list[Stack] = [_BEGIN]
    for length in range(1, longest + 1):
        last, following = length == longest, list[Stack]()
        for stack in level:
            for name in _TOPPING if last and length > 1 else OPCODES:
                after = _step(stack, name)
                if not after:
                    continue
                if lengths.setdefault(after[-1], length) == length:
                    ends.setdefault(after[-1], []).append((stack, name))
                if not last and steps.setdefault(after, length) == length:
                    if after not in before:
                        following.append(after)
                    before.setdefault(after, []).append((stack, name))
        level = following
    far = list(lengths)
    needed = np.array([lengths[each] for each in far])
    values = np.array([[_at(each, x) for x in _INPUTS] for each in far], dtype=np.int64)
    by_length = [np.flatnonzero(needed == length).tolist() for length in range(1, longest + 1)]
    return _Known(far, values, needed, by_length, ends, before)


@lru_cache(maxsize=1 << 18)
def _reaches(stack: Stack, left: int, far: int) -> bool:
    """Whether at most so many opcodes bring this on top."""
    if stack and stack[-1] == far:
        return True
    if left > 1:
        return any(_reaches(after[-left:], left - 1, far) for _, after in _nexts(stack))
    if left == 0 or not stack:
        return left == 1 and 0 <= far <= 9
    top, under = stack[-1], stack[-2] if len(stack) > 1 else far + 1
    pairs = len(stack) > 1 and far in (under, under + top, under - top, under * top)
    return pairs or far == -top or 0 <= far <= 9


def _at(far: int, x: int) -> int:
    """What a program makes of x that makes `far` of `_FAR`."""
    found, power = 0, 1
    while far:
        coefficient = (far + _FAR // 2) % _FAR - _FAR // 2
        found, power, far = found + coefficient * power, power * x, (far - coefficient) // _FAR
    return found


@lru_cache(maxsize=1 << 14)
def _wanted(pairs: tuple[tuple[int, int], ...], longest: int) -> int | None:
    """The function of fewest opcodes that passes these examples; None for none, or where there are two of them."""
    known = _known(longest)
    passing = np.flatnonzero((known.values[:, [x for x, _ in pairs]] == [y for _, y in pairs]).all(axis=1))
    if not len(passing):
        return None
    wanted = passing[known.needed[passing] == known.needed[passing].min()]
    return int(wanted[0]) if len(wanted) == 1 else None


def _pairs(prompt: str) -> tuple[tuple[int, int], ...]:
    found = _PROMPT.fullmatch(prompt)
    if found is None:
        raise SettingsError(f"{prompt!r} is no prompt of prog, such as 1>3;4>6;5>7|")
    return tuple((int(x), int(y)) for x, y in (pair.split(">") for pair in found[1][:-1].split(";")))
