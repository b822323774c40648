"""Which tests take turns, unless all rows are wanted: those whose CPU time was recorded as long."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from zlib import crc32

COSTS = Path(__file__).parents[1] / "costs.json"
"""CPU seconds per row and number of rows of every test that takes turns. `make test-costs` records them."""
LONG_ROW, LONG_TEST = 0.15, 0.3
"""CPU seconds of one row, or of all rows of a test, from which on the rows take turns."""
TURNS = 7
"""Of this many seeds in a row, one runs a row of a long test. Seeds are days, so every row has run after a week."""
SERVED = 3
"""The same of long tests below tests/integration, of servers, clients and commands, where most faults show first."""
OTHERS = 3
"""The same of other tests with more than two rows: one day of three."""
TOGETHER = {"test_gpu_kit.py", "test_tensor_parallel.py"}
"""Files whose tests look at one long run, which none of them is charged with: they are long, and have one turn."""


def name_of(node: str) -> str:
    """The name of a test in the recorded costs: its file and function without the folder and the parameters."""
    path, _, test = node.partition("::")
    return f"{path.rpartition('/')[2]}::{test.partition('[')[0]}"


def take_turns(cost: float, rows: int) -> bool:
    """Whether a test of this mean cost and this number of rows takes turns."""
    return cost > LONG_ROW or (rows > 2 and cost * rows > LONG_TEST)


def recorded(path: Path = COSTS) -> dict[str, list[float]]:
    """The recorded costs by the tests' names; a test that has none runs always."""
    return json.loads(path.read_text("utf-8"))


def off_turn(nodes: Iterable[str], seed: int, costs: Mapping[str, list[float]]) -> set[str]:
    """The rows of tests that take turns which another seed runs.

    One in TURNS rows of a long test runs, one in SERVED below tests/integration, and one in OTHERS of other tests that
    have more than two. Where a row stands depends on the test's own rows alone, so that a test selects the same rows
    alone and among others, and rows that follow each other in a product fall on different seeds.
    """
    tests: dict[str, list[str]] = {}
    for node in nodes:
        tests.setdefault(node.partition("[")[0], []).append(node)
    others = set()
    for test, rows in tests.items():
        path = test.partition("::")[0]
        long = SERVED if "tests/integration/" in test else TURNS
        if path.rpartition("/")[2] in TOGETHER:
            others |= set(rows) if crc32(path.encode()) % long != seed % long else set()
            continue
        turns = long if name_of(test) in costs else OTHERS if len(rows) > 2 else 1
        first = crc32(test.encode())
        for at, node in enumerate(Random(first).sample(sorted(rows), len(rows)), first):
            if at % turns != seed % turns:
                others.add(node)
    return others
