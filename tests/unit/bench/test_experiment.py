"""Experiments measure every cell once, go on after an interruption, and sum up what they found with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery_benchmarks.experiment import Experiment
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.results import validate


def test_an_interrupted_experiment_continues(tmp_path: Path) -> None:
    measured: list[tuple[str, int]] = []

    def run(method: str, seed: int) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((method, seed))
        return {"share": seed / 4}

    path, grid = tmp_path / "out.json", {"method": ("a", "b"), "seed": (1, 2)}
    metrics = {"mean": lambda rows: float(np.mean([row["share"] for row in rows]))}
    experiment = Experiment(grid, run, metrics, {"texts": 3, "sizes": (1, 2)})
    with pytest.raises(KeyboardInterrupt):
        experiment.measure(path)
    validate(json.loads(path.read_text()))
    assert len(json.loads(path.read_text())["rows"]) == 2
    measured.clear()
    found = experiment.measure(path)
    # The cells that are there are not measured again.
    assert measured == [("b", 1), ("b", 2)]
    assert [(row["method"], row["seed"], row["share"]) for row in found["rows"]] == [
        ("a", 1, 0.25), ("a", 2, 0.5), ("b", 1, 0.25), ("b", 2, 0.5)
    ]  # fmt: skip
    assert found["mean"] == 0.375 and found["sizes"] == [1, 2]
    assert experiment.measure(path)["rows"] == found["rows"] and len(measured) == 2
    with pytest.raises(SettingsError, match="other settings"):
        Experiment(grid, run, metrics, {"texts": 4}).measure(path)


def test_cells_with_names_are_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    Experiment([{"name": "plain"}], lambda name: {"length": len(name)}).measure(path)
    found = Experiment({"name": ["guided"]}, lambda name: {"length": len(name)}).measure(path, "make it")
    assert found["rows"] == {"plain": {"length": 5}, "guided": {"length": 6}} and found["command"] == "make it"


def test_intervals_hold_what_they_promise() -> None:
    random = np.random.default_rng(0)
    held = sum(
        low <= 0.5 <= high
        for low, high in (interval(random.random(40), resamples=400, seed=seed) for seed in range(200))
    )
    assert 180 <= held <= 199
    values = random.normal(size=64)
    low, high = interval(values)
    assert (low, high) == interval(values) != interval(values, seed=1)
    # The central limit says nearly the same.
    half = 1.96 * values.std() / 8
    assert abs(values.mean() - half - low) < 0.03 and abs(values.mean() + half - high) < 0.03
    assert interval(np.array([3.0])) == (3.0, 3.0)


def test_pairs_are_drawn_together() -> None:
    plain = np.random.default_rng(1).random(30) + 1
    ratio = interval(
        plain, 2 * plain, statistic=lambda a, b, axis=-1: b.sum(axis=axis) / a.sum(axis=axis), resamples=100
    )
    assert ratio == (2.0, 2.0)
    places = interval(np.arange(30), statistic=lambda some: plain[some].mean(), vectorized=False, resamples=500)
    low, high = interval(plain, resamples=500)
    assert abs(places[0] - low) < 0.02 and abs(places[1] - high) < 0.02
