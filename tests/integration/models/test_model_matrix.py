"""Causal classes of `transformers` from folders, as `benchmarks/model_matrix.py` has found them to run.

`make test-all` runs a few, other ones every day; `make test-matrix` all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from covering import some
from decodery_benchmarks.results import read_result
from model_matrix import outcome
from small_configs import FAMILIES, WITH_IMAGES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FOUND: dict[str, dict[str, Any]] = {
    name: read_result(RESULTS / f"{name}.json") for name in ("model_matrix", "model_matrix-newest")
}
"""With the oldest `transformers` that is allowed, and with the newest."""
NEWEST = FOUND["model_matrix-newest"]["transformers"] == transformers.__version__
ROWS: dict[str, dict[str, Any]] = FOUND["model_matrix-newest" if NEWEST else "model_matrix"]["rows"]


def test_every_causal_class_has_a_row() -> None:
    assert {*FAMILIES, *WITH_IMAGES} == {*ROWS}


@pytest.mark.parametrize("name", FOUND)
def test_what_runs_is_near_and_what_does_not_says_why(name: str) -> None:
    for family, row in FOUND[name]["rows"].items():
        if row["runs"] in ("native", "adapter"):
            assert row["greedy"] and row["difference"] < 1e-3 and row["drafts"] in ("trees", "chains", "none"), family
        else:
            assert row["runs"] in ("refused", "not built") and row["reason"], family


@pytest.mark.parametrize("family", some(sorted(name for name, row in ROWS.items() if row["runs"] != "not built"), 5))
def test_a_family_runs_as_recorded(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    found, recorded = outcome(family, tmp_path / "model"), dict(ROWS[family])
    assert found.pop("difference", 0.0) < 1e-3
    recorded.pop("difference", None)
    assert found == {name: value for name, value in recorded.items() if name != "name"}
