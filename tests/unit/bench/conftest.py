"""What tests of the benchmark share: a result that several of them look at."""

from __future__ import annotations

import pytest

from decodery.bench import result
from tiny_bench import make_lm, measure


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> result.Result:
    return measure(make_lm(), tmp_path_factory.mktemp("home"))
