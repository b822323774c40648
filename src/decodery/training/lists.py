"""Tasks on short lists of letters: what a small diffusion model learns in minutes, and methods can be judged by.

Some have one answer, so that tokens of one pass cannot contradict each other if each is right; others have many, and
then they can (ParallelBench: Understanding the Trade-offs of Parallel Decoding in Diffusion LLMs, 2025). Its two
puzzles are squares of four by four. Others are not of that benchmark: sums, whose one answer takes a carry;
expressions, whose value is written after a step in between; JSON, most of whose tokens are there for the sake of the
form; the least case of two tokens that hang on each other; groups that each copy one letter, any; and lists of names of
two letters, whose tokens hang on each other within a name as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decodery.core.errors import SettingsError

from . import grids

FILLER, END, MASK, GIVEN, NEW = "_", "<end>", "<mask>", "=", "+"
_OPEN, _CLOSE, _TIMES, _MINUS = "(", ")", "*", "-"
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
DIGITS = tuple("0123456789")
KEYS = tuple(f'"{letter}"' for letter in LETTERS)
LEAST, MOST = 3, 6
"""How many letters a list has, unless more are asked for."""
_SUMMED = 3
"""Digits of a number that is added."""
_GROUPS, _COPIES = 3, 3
"""Of seed-copy."""

Words = list[str]


@dataclass(frozen=True)
class ListTask:
    """A task about a list of letters.

    Attributes:
        room: Places that an answer to `most` letters needs, an end with them.
    """

    pose: Callable[[Words, np.random.Generator], Words]  # The words after the task's name, of a list of letters
    answer: Callable[[Words, np.random.Generator], Words]  # A right one to what was posed, at random
    right: Callable[[Words, Words], bool]  # Whether an answer to what was posed is one
    room: Callable[[int], int] = lambda most: most + 2
    asks: Callable[[int], int] = lambda most: most + 1


def _posed(items: Words, draws: np.random.Generator) -> Words:
    return items


def _with_place(more: int) -> Callable[[Words, np.random.Generator], Words]:
    """A place of the list before the list; more: how many there are after its last letter."""
    return lambda items, draws: [DIGITS[int(draws.integers(min(len(items) + more, len(DIGITS))))], *items]


def _only(
    answer: Callable[[Words], Words],
    pose: Callable[[Words, np.random.Generator], Words] = _posed,
    room: Callable[[int], int] = lambda most: most + 2,
) -> ListTask:
    """A task with one answer."""
    return ListTask(pose, lambda posed, draws: answer(posed), lambda posed, found: found == answer(posed), room)


def _some(answers: Callable[[Words], list[Words]]) -> ListTask:
    """A task with a few answers, all alike."""

    def answer(posed: Words, draws: np.random.Generator) -> Words:
        found = answers(posed)
        return found[int(draws.integers(len(found)))]

    return ListTask(_posed, answer, lambda posed, found: found in answers(posed))


def _insert(items: Words, place: int) -> Words:
    return [*items[:place], NEW, *items[place:]]


def _remove(items: Words, place: int) -> Words:
    return items[:place] + items[place + 1 :]


def _replace(items: Words, place: int) -> Words:
    return [*items[:place], NEW, *items[place + 1 :]]


def _shuffle(items: Words, draws: np.random.Generator) -> Words:
    """Any other order."""
    while (found := [items[place] for place in draws.permutation(len(items))]) == items:
        pass
    return found


def _at(change: Callable[[Words, int], Words], more: int = 0) -> ListTask:
    return _only(lambda posed: change(posed[1:], int(posed[0])), _with_place(more))


def _anywhere(change: Callable[[Words, int], Words], more: int = 0) -> ListTask:
    return _some(lambda posed: [change(posed, place) for place in range(len(posed) + more)])


def _paired(items: Words, draws: np.random.Generator) -> Words:
    """Letters and digits in turn, as many as there were letters."""
    return [word for letter in items[: len(items) // 2] for word in (letter, DIGITS[int(draws.integers(10))])]


def _json(posed: Words) -> Words:
    pairs = [[f'"{letter}"', ":", digit] for letter, digit in zip(posed[::2], posed[1::2], strict=True)]
    return ["{", *pairs[0], *(word for pair in pairs[1:] for word in (",", *pair)), "}"]


def _added(items: Words, draws: np.random.Generator) -> Words:
    """Two numbers of as many digits each."""
    first, second = ([DIGITS[each] for each in draws.integers(10, size=_SUMMED)] for _ in range(2))
    return [*first, NEW, *second]


def _sum(posed: Words) -> Words:
    total = int("".join(posed[:_SUMMED])) + int("".join(posed[-_SUMMED:]))
    return list(f"{total:0{_SUMMED + 1}d}")


def _expression(items: Words, draws: np.random.Generator) -> Words:
    """A sum or a difference, neither of them below zero, times a number, or the other way round."""
    first, second, factor = (int(each) for each in draws.integers(1, 10, size=3))
    plus, before = draws.integers(2, size=2)
    inner = [_OPEN, DIGITS[first], NEW, DIGITS[second], _CLOSE]
    if not plus:
        inner = [_OPEN, DIGITS[max(first, second)], _MINUS, DIGITS[min(first, second)], _CLOSE]
    return [DIGITS[factor], _TIMES, *inner] if before else [*inner, _TIMES, DIGITS[factor]]


def _worked_out(posed: Words) -> Words:
    """What stands in brackets, then all."""
    start = posed.index(_OPEN)
    first, sign, second = posed[start + 1 : start + 4]
    inner = int(first) + int(second) if sign == NEW else int(first) - int(second)
    factor = posed[0] if start else posed[-1]
    step = [factor, _TIMES, *str(inner)] if start else [*str(inner), _TIMES, factor]
    return [*step, GIVEN, *str(inner * int(factor))]


def _seeded(posed: Words, draws: np.random.Generator) -> Words:
    """Some groups of copies of one of the letters each."""
    return [posed[number] for number in draws.integers(len(posed), size=_GROUPS) for _ in range(_COPIES)]


def _is_seeded(posed: Words, found: Words) -> bool:
    groups = [set(found[start : start + _COPIES]) for start in range(0, len(found), _COPIES)]
    return len(found) == _GROUPS * _COPIES and all(len(each) == 1 and each <= set(posed) for each in groups)


def _of_names(task: ListTask) -> ListTask:
    """The same of names of two letters, the first of which differ. What comes in is two words too."""

    def spelled(names: Words) -> Words:
        return [letter for name in names for letter in (name if len(name) == 2 else 2 * name)]

    def folded(words: Words) -> Words:
        pairs = ["".join(words[start : start + 2]) for start in range(0, len(words), 2)]
        return [NEW if each == 2 * NEW else each for each in pairs]

    def pose(items: Words, draws: np.random.Generator) -> Words:
        lasts = draws.integers(len(LETTERS), size=len(items))
        return spelled(task.pose([first + LETTERS[last] for first, last in zip(items, lasts, strict=True)], draws))

    return ListTask(
        pose,
        lambda posed, draws: spelled(task.answer(folded(posed), draws)),
        lambda posed, found: task.right(folded(posed), folded(found)),
        lambda most: 2 * most + 1,
        lambda most: 2 * most,
    )


def _four(items: Words, draws: np.random.Generator) -> Words:
    return [LETTERS[each] for each in draws.choice(len(LETTERS), grids.SIDE, replace=False)]


def _square(posed: Words, draws: np.random.Generator) -> Words:
    squares = grids.latin_squares()
    return [posed[number] for number in squares[int(draws.integers(len(squares)))]]


def _with_blanks(items: Words, draws: np.random.Generator) -> Words:
    """The cells of a sudoku, fillers where they are to be filled in."""
    square, blank = grids.sudoku(draws)
    return [FILLER if hidden else DIGITS[number + 1] for number, hidden in zip(square, blank, strict=True)]


def _filled(posed: Words) -> Words:
    return [
        DIGITS[number + 1] for number in grids.solved([None if word == FILLER else int(word) - 1 for word in posed])
    ]


LISTS: dict[str, ListTask] = {
    "copy": _only(lambda items: items),
    "reverse": _only(lambda items: items[::-1]),
    "sort": _only(sorted),
    "shuffle": ListTask(_posed, _shuffle, lambda posed, found: sorted(found) == sorted(posed) and found != posed),
    "insert-index": _at(_insert, 1),
    "insert-random": _anywhere(_insert, 1),
    "remove-index": _at(_remove),
    "remove-random": _anywhere(_remove),
    "replace-index": _at(_replace),
    "replace-random": _anywhere(_replace),
}
"""ParallelBench's tasks on lists, by name. What is inserted, or put in a letter's place, is one word of its own."""
_CELLS = grids.SIDE * grids.SIDE
PUZZLES: dict[str, ListTask] = {
    "latin-square": ListTask(
        _four, _square, lambda posed, found: grids.is_latin(found, posed), lambda most: _CELLS + 1,
        lambda most: grids.SIDE,
    ),
    "sudoku": replace(_only(_filled, _with_blanks, lambda most: _CELLS + 1), asks=lambda most: _CELLS),
}  # fmt: skip
"""ParallelBench's puzzles, by name; the squares have one size."""
NAMES: dict[str, ListTask] = {f"{name}-names": _of_names(LISTS[name]) for name in ("copy", "shuffle", "replace-random")}
"""Tasks on lists whose items are two words each."""
TASKS = LISTS | PUZZLES | NAMES | {
    "add": replace(_only(_sum, _added, lambda most: _SUMMED + 2), asks=lambda most: 2 * _SUMMED + 1),
    "expr": replace(_only(_worked_out, _expression, lambda most: 9), asks=lambda most: 7),
    "json": _only(_json, _paired, lambda most: 4 * (most // 2) + 2),
    "pair": _some(lambda posed: [posed[:2], posed[-2:]]),
    "seed-copy": ListTask(_posed, _seeded, _is_seeded, lambda most: _GROUPS * _COPIES + 1),
}  # fmt: skip
"""All there are."""
VOCABULARY = (
    FILLER, END, MASK, GIVEN, NEW, *TASKS, *LETTERS, *DIGITS, *KEYS, "{", "}", ":", ",", _OPEN, _CLOSE, _TIMES, _MINUS,
)  # fmt: skip


@dataclass(frozen=True)
class ListExample:
    """A prompt [length] and one answer [places], ends after it, as words."""

    task: str
    posed: Words  # What stands between the task's name and the sign that the prompt ends with
    answer: Words
    length: int
    places: int

    @property
    def prompt(self) -> Words:
        words = [self.task, *self.posed, GIVEN]
        return [FILLER] * (self.length - len(words)) + words

    @property
    def canvas(self) -> Words:
        return self.answer + [END] * (self.places - len(self.answer))

    def right(self, words: Sequence[str]) -> bool:
        """Whether these words, without an end, are an answer."""
        return TASKS[self.task].right(self.posed, list(words))


def prompt_length(tasks: Sequence[str], most: int = MOST) -> int:
    """Tokens of a prompt of these tasks, padded in front, on lists of up to `most` letters."""
    return 2 + max(TASKS[task].asks(most) for task in tasks)


def canvas_length(tasks: Sequence[str], most: int = MOST) -> int:
    """Places that the longest answer to these tasks needs, an end with it."""
    return max(TASKS[task].room(most) for task in tasks)


def examples(tasks: Sequence[str], count: int, draws: np.random.Generator, most: int = MOST) -> list[ListExample]:
    """Fresh ones, of all tasks in turn, on lists of up to `most` letters."""
    found, length, places = [], prompt_length(tasks, most), canvas_length(tasks, most)
    for number in range(count):
        name = tasks[number % len(tasks)]
        size = int(draws.integers(LEAST, most + 1))
        items = [LETTERS[each] for each in draws.choice(len(LETTERS), size, replace=False)]
        posed = TASKS[name].pose(items, draws)
        found.append(ListExample(name, posed, TASKS[name].answer(posed, draws), length, places))
    return found


def known(names: Sequence[str], most: int = MOST) -> tuple[str, ...]:
    """These names of tasks."""
    if not names or (unknown := [name for name in names if name not in TASKS]):
        wrong = unknown[0] if names else ""
        raise SettingsError(f"there is no task {wrong!r} on lists; the tasks are {', '.join(TASKS)}")
    if not LEAST <= most <= len(LETTERS):
        raise SettingsError(f"lists have up to {LEAST} to {len(LETTERS)} letters, not {most}")
    return tuple(names)


def ids(words: Sequence[str]) -> list[int]:
    return [VOCABULARY.index(word) for word in words]
