"""Tasks on short lists of letters: what a small diffusion model learns in minutes, and methods can be judged by.

Some have one answer, so that tokens of one pass cannot contradict each other if each is right; others have many, and
then they can (ParallelBench: Understanding the Trade-offs of Parallel Decoding in Diffusion LLMs, 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SettingsError

FILLER, END, MASK, GIVEN, NEW = "_", "<end>", "<mask>", "=", "+"
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
LEAST, MOST = 3, 6
"""How many letters a list has."""
PROMPT, CANVAS = 2 + MOST, 8
"""Tokens of a prompt, fillers in front of it included, so that answers begin at one place; and of an answer."""

Words = list[str]


@dataclass(frozen=True)
class Task:
    """answer: one for a list of letters, drawn where there are several. right: whether an answer is one."""

    answer: Callable[[Words, np.random.Generator], Words]
    right: Callable[[Words, Words], bool]


def _only(answer: Callable[[Words], Words]) -> Task:
    """A task with one answer."""
    return Task(lambda items, draws: answer(items), lambda items, found: found == answer(items))


def _removed(items: Words, found: Words) -> bool:
    return any(found == items[:each] + items[each + 1 :] for each in range(len(items)))


def _replaced(items: Words, found: Words) -> bool:
    return any(found == [*items[:each], NEW, *items[each + 1 :]] for each in range(len(items)))


def _shuffle(items: Words, draws: np.random.Generator) -> Words:
    return [items[place] for place in draws.permutation(len(items))]


def _remove(items: Words, draws: np.random.Generator) -> Words:
    place = int(draws.integers(len(items)))
    return items[:place] + items[place + 1 :]


def _replace(items: Words, draws: np.random.Generator) -> Words:
    place = int(draws.integers(len(items)))
    return [*items[:place], NEW, *items[place + 1 :]]


TASKS: dict[str, Task] = {
    "copy": _only(lambda items: items),
    "reverse": _only(lambda items: items[::-1]),
    "sort": _only(sorted),
    "shuffle": Task(_shuffle, lambda items, found: sorted(found) == sorted(items)),
    "remove": Task(_remove, _removed),
    "replace": Task(_replace, _replaced),
}
"""By name. remove and replace: one letter, whichever it is; shuffle: any order."""

VOCABULARY = (FILLER, END, MASK, GIVEN, NEW, *TASKS, *LETTERS)


@dataclass(frozen=True)
class Example:
    """A prompt [PROMPT] and one answer [CANVAS], ends behind it, as words."""

    task: str
    items: Words
    answer: Words

    @property
    def prompt(self) -> Words:
        words = [self.task, *self.items, GIVEN]
        return [FILLER] * (PROMPT - len(words)) + words

    @property
    def canvas(self) -> Words:
        return self.answer + [END] * (CANVAS - len(self.answer))


def examples(tasks: Sequence[str], count: int, draws: np.random.Generator) -> list[Example]:
    """Fresh ones, of all tasks in turn."""
    found = []
    for number in range(count):
        name = tasks[number % len(tasks)]
        size = int(draws.integers(LEAST, MOST + 1))
        items = [LETTERS[each] for each in draws.choice(len(LETTERS), size, replace=False)]
        found.append(Example(name, items, TASKS[name].answer(items, draws)))
    return found


def known(names: Sequence[str]) -> tuple[str, ...]:
    """These names of tasks. Raises SettingsError for others."""
    if not names or (unknown := [name for name in names if name not in TASKS]):
        wrong = unknown[0] if names else ""
        raise SettingsError(f"there is no task {wrong!r} on lists; the tasks are {', '.join(TASKS)}")
    return tuple(names)


def ids(words: Sequence[str]) -> list[int]:
    return [VOCABULARY.index(word) for word in words]
