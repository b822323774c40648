"""Rows of tests take turns: those of long tests run for one seed in seven, whichever other tests there are."""

from __future__ import annotations

import re
from pathlib import Path

from turns import OTHERS, SERVED, TOGETHER, TURNS, name_of, off_turn, recorded, take_turns

TESTS = Path(__file__).parents[2]
ROWS = [f"tests/unit/a/test_a.py::test_long[{row}-{column}]" for row in range(9) for column in range(TURNS)]
ONE = "tests/unit/b/test_b.py::test_one"
SHORT = "tests/unit/b/test_b.py::test_short[0]"
SHORTS = [f"tests/unit/b/test_b.py::test_shorts[{row}]" for row in range(4 * OTHERS)]
COSTS = {"test_a.py::test_long": [0.5, 63], "test_b.py::test_one": [2.0, 1]}


def on_turn(nodes: list[str], seed: int) -> set[str]:
    return set(nodes) - off_turn(nodes, seed, COSTS)


def test_every_row_of_a_long_test_runs_for_one_of_the_seeds_in_a_row() -> None:
    runs = [on_turn([*ROWS, ONE, SHORT], seed) for seed in range(5, 5 + TURNS)]
    for node in (*ROWS, ONE):
        assert sum(node in run for run in runs) == 1
    assert all(SHORT in run for run in runs), "what has few rows and no recorded cost runs always"
    assert all(sum(node in run for node in ROWS) == len(ROWS) / TURNS for run in runs)
    days = [on_turn(SHORTS, seed) for seed in range(OTHERS)]
    assert all(len(day) == len(SHORTS) / OTHERS for day in days) and set.union(*days) == set(SHORTS)
    served = [node.replace("unit", "integration") for node in (*ROWS, ONE)]
    apart = [on_turn(served, seed) for seed in range(SERVED)]
    assert sum(map(len, apart)) == len(served) and set.union(*apart) == set(served)
    # Rows are not those of one column.
    assert all(len({node[-2] for node in run & set(ROWS)}) > 1 for run in runs)


def test_tests_that_share_a_long_run_have_one_turn() -> None:
    kit = [f"tests/integration/test_gpu_kit.py::test_{name}" for name in ("a", "b[1]", "b[2]", "c")]
    days = [on_turn([*kit, ONE], seed) for seed in range(SERVED)]
    assert sorted(len(day & set(kit)) for day in days) == [0] * (SERVED - 1) + [len(kit)]
    assert {path.name for path in TESTS.rglob("test_*.py")} >= TOGETHER


def test_the_rows_of_a_test_do_not_depend_on_the_others() -> None:
    assert on_turn([ONE, SHORT, *reversed(ROWS)], 3) & set(ROWS) == on_turn(ROWS, 3)


def test_what_takes_turns_is_long_itself_or_with_its_rows() -> None:
    assert take_turns(0.4, 1) and take_turns(0.05, 20)
    assert not take_turns(0.1, 1) and not take_turns(0.05, 3)


def test_recorded_costs_are_of_tests_that_exist() -> None:
    there = set()
    for path in TESTS.rglob("test_*.py"):
        there |= {f"{path.name}::{name}" for name in re.findall(r"(?m)^(?:def|class) (\w+)", path.read_text("utf-8"))}
    missing = recorded().keys() - {name_of(name) for name in there}
    # Some may have another name since; `make test-costs` records all of them anew.
    assert len(missing) < len(recorded()) / 10, missing
