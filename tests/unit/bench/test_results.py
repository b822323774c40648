"""Result files of benchmarks: all have one schema, and what is written is read back."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from decodery_benchmarks import results
from decodery_benchmarks.results import RESULTS

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_result_file_has_the_schema(path: Path) -> None:
    results.validate(json.loads(path.read_text("utf-8")))


def test_there_are_result_files() -> None:
    assert len(FILES) > 150 and not [path for path in RESULTS.iterdir() if path not in FILES]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out" / "found.json"
    found = {"rows": {"a": {"share": 0.5}, "b": {"share": 0.25}}, "texts": 3, "ratio": 1.5, "settings": {"seed": 0}}
    results.write_result(path, found, summary=["ratio"])
    stored = json.loads(path.read_text())
    results.validate(stored)
    assert stored["settings"] == {"seed": 0, "texts": 3} and stored["summary"] == {"ratio": 1.5}
    assert stored["rows"] == [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.25}]
    again = results.begun_result(path)
    assert again["rows"]["b"] == {"share": 0.25} and (again["texts"], again["ratio"]) == (3, 1.5)
    assert "texts" in again and "nothing" not in again and again.get("nothing", 7) == 7
    with pytest.raises(KeyError):
        again["nothing"]
    # What is gone on with keeps what it had.
    again["rows"]["c"] = {"share": 1.0}
    results.write_result(path, again | {"ratio": 2.0}, summary=["ratio"])
    assert json.loads(path.read_text()) | {"created": None} == stored | {
        "created": None, "rows": [*stored["rows"], {"name": "c", "share": 1.0}], "summary": {"ratio": 2.0}
    }  # fmt: skip
    assert results.begun_result(tmp_path / "none.json")["rows"] == {}


@pytest.mark.parametrize("change", [{"schema": 2}, {"rows": {}}, {"more": 1}, {"commit": "main"}, {"machine": {}}])
def test_what_is_no_result_is_refused(change: dict) -> None:
    with pytest.raises(jsonschema.ValidationError):
        results.validate(json.loads(FILES[0].read_text("utf-8")) | change)
