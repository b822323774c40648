"""What the generators of the documentation share: the recorded figures, and tables of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decodery.bench.report import markdown as table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
# Beside the package, wherever a program that makes pages is run from.
from decodery_benchmarks.results import RESULTS, Result, read_result  # noqa: E402


def load(name: str) -> Result:
    """What a benchmark recorded under this name."""
    return read_result(RESULTS / f"{name}.json")


def recorded(name: str) -> bool:
    """Whether a benchmark has recorded something under this name: what takes a quiet machine may still be to come."""
    return (RESULTS / f"{name}.json").is_file()


def load_all(pattern: str) -> dict[str, Result]:
    """What was recorded under the names that match, by name."""
    return {path.stem: load(path.stem) for path in sorted(RESULTS.glob(f"{pattern}.json"))}


def runs_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs among recorded figures, without the facts beside them."""
    return {name: each for name, each in found.items() if isinstance(each, dict)}


def table_of(runs: dict[str, dict[str, Any]], columns: Iterable[str] = ()) -> str:
    """A row per run, a column per figure: those of all runs unless they are named."""
    shown = list(columns) or list(dict.fromkeys(name for run in runs.values() for name in run))
    rows = [[name, *(_cell(run.get(column)) for column in shown)] for name, run in runs.items()]
    return table(["", *(column.replace("_", " ") for column in shown)], rows)


def _cell(value: Any) -> str:
    return "" if value is None else str(value) if isinstance(value, str) else f"{value:g}"
