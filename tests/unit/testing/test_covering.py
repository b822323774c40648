"""The rows that stand for a matrix hold every pair, are few, and depend on the seed alone."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from covering import greedy_cover


def parts(rows: list[tuple[int, ...]], strength: int) -> set[tuple[tuple[int, int], ...]]:
    return {part for row in rows for part in combinations(enumerate(row), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_that_occurs_is_held(strength: int) -> None:
    # Some combinations never occur, as where a rule refuses a drafter.
    rows = [row for row in product(range(3), range(12), range(4), range(6)) if sum(row) % 5]
    chosen = greedy_cover(rows, strength)
    assert parts(chosen, strength) == parts(rows, strength)
    assert set(chosen) <= set(rows) and len(set(chosen)) == len(chosen)
    assert chosen == greedy_cover(rows, strength)
    # Another seed, other rows.
    other = greedy_cover(rows, strength, seed=1)
    assert other != chosen and parts(other, strength) == parts(rows, strength)


def test_rows_are_few() -> None:
    rows = list(product(range(3), range(12), range(4), range(6)))
    # No fewer than the two largest columns have pairs.
    assert all(72 <= len(greedy_cover(rows, 2, seed)) <= 85 for seed in range(10))
    assert len(greedy_cover(rows, 1)) == 12
