"""Squares of four by four, each of four symbols once in every row and column: ParallelBench's two puzzles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations

import numpy as np

SIDE = 4
BLANKS = 4
"""Cells of a sudoku that are to be filled in."""


@cache
def latin_squares() -> np.ndarray:
    """All 576 Latin squares of the numbers 0 to 3, [576, 16], row by row."""
    rows, found = [np.array(each) for each in permutations(range(SIDE))], [np.empty((0, SIDE), dtype=int)]
    for _ in range(SIDE):
        found = [np.vstack([above, row]) for above in found for row in rows if not (above == row).any()]
    return np.array([square.reshape(-1) for square in found])


@cache
def sudokus() -> np.ndarray:
    """The 288 of them whose quarters hold every number too, [288, 16]."""
    quarters = latin_squares().reshape(-1, 2, 2, 2, 2).swapaxes(2, 3).reshape(-1, SIDE, SIDE)
    return latin_squares()[(np.sort(quarters, axis=2) == np.arange(SIDE)).all(axis=(1, 2))]


def sudoku(draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One at random, [16], and which of its cells are to be filled in, [16] bool: in a single way."""
    square = sudokus()[int(draws.integers(len(sudokus())))]
    while True:
        blank = np.zeros(SIDE * SIDE, dtype=bool)
        blank[draws.choice(SIDE * SIDE, BLANKS, replace=False)] = True
        if (sudokus()[:, ~blank] == square[~blank]).all(axis=1).sum() == 1:
            return square, blank


def solved(cells: Sequence[int | None]) -> list[int]:
    """The only sudoku that has these numbers in the cells that have one."""
    given = np.array([-1 if cell is None else cell for cell in cells])
    [found] = sudokus()[((sudokus() == given) | (given < 0)).all(axis=1)]
    return [int(number) for number in found]


def is_latin(cells: Sequence[str], symbols: Sequence[str]) -> bool:
    """Whether cells, row by row, are a Latin square of these symbols."""
    if len(cells) != SIDE * SIDE:
        return False
    lines = [cells[SIDE * row : SIDE * (row + 1)] for row in range(SIDE)] + [cells[row::SIDE] for row in range(SIDE)]
    return all(sorted(line) == sorted(symbols) for line in lines)
