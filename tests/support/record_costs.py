"""A plugin that records the CPU seconds of tests: `make test-costs`. Run it in one process (`-n 0`).

Where some files are named, the costs of all other tests stay as they are recorded.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

from turns import COSTS, name_of, recorded, take_turns

_seconds: dict[str, float] = defaultdict(float)


def _spent() -> float:
    """CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _spent()
    result = yield
    # Tests of every method of a family run always.
    if "conformance/" not in item.nodeid and not item.get_closest_marker("invariant"):
        _seconds[item.nodeid] += _spent() - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    tests: dict[str, list[float]] = defaultdict(list)
    for node, seconds in _seconds.items():
        tests[name_of(node)].append(seconds)
    means = {name: (sum(rows) / len(rows), len(rows)) for name, rows in tests.items()}
    long = {name: [round(mean, 2), rows] for name, (mean, rows) in means.items() if take_turns(mean, rows)}
    if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        long |= {name: cost for name, cost in recorded().items() if name not in means}
    long = dict(sorted(long.items()))
    COSTS.write_text("{\n" + ",\n".join(f"  {json.dumps(name)}: {cost}" for name, cost in long.items()) + "\n}\n")
