"""The measured cost of a pass: how it is read, measured and kept."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest
import torch

from decodery.bench import passes
from decodery.bench.report import page, table
from decodery.bench.result import dump, read
from decodery.cli.info import collect
from decodery.core.errors import CorruptFile
from decodery.models.footprint import precision, weight_bytes
from decodery.models.native.int8 import Int8Linear
from decodery.step import pass_cost as cost
from decodery.step.pass_cost import CostCurve, cost_curve, time_passes
from decodery.testing.models import TableModel, tiny_transformer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path))
    # However busy the machine is, everything is timed.
    monkeypatch.setattr(cost, "_SECONDS", 1e9)
    return tmp_path


def test_between_measured_points_lies_a_straight_line() -> None:
    curve = CostCurve((1, 4, 8), (2.0, 5.0, 6.0))
    assert [curve.seconds(rows) for rows in (1, 2, 4, 6, 8)] == pytest.approx([2.0, 3.0, 5.0, 5.5, 6.0])
    assert curve.seconds(0) == 2.0
    assert curve.seconds(16) == pytest.approx(8.0)
    assert CostCurve((4,), (3.0,)).seconds(9) == 3.0


def test_a_disturbed_point_does_not_make_fewer_rows_dearer() -> None:
    curve = CostCurve.of({1: [1.0, 9.0, 1.0], 2: [7.0], 4: [2.0, 2.0], 8: [3.0]})
    assert curve == CostCurve((1, 2, 4, 8), (1.0, 2.0, 2.0, 3.0))


def test_a_longer_text_costs_more_for_every_row() -> None:
    near = {1: [2.0], 16: [5.0]}
    far = cost.FAR_CONTEXT - cost.CONTEXT
    assert cost.FAR_ROWS == (1, 16)
    curve = CostCurve.of(near, {1: [2.0 + far * 0.25], 16: [5.0 + far * 4.0]})
    assert (curve.token, curve.row_token) == (0.0, 0.25)
    curve = CostCurve.of(near, {1: [2.0 + far * 0.75], 16: [5.0 + far * 4.5]})
    assert (curve.token, curve.row_token) == (0.5, 0.25)
    assert curve.seconds(16, cost.CONTEXT + 100) == 5.0 + 100 * 4.5
    assert curve.seconds(16, 5) == curve.seconds(16) == 5.0, "shorter texts are not measured"
    assert CostCurve.of(near, {1: [1.0], 16: [4.0]}) == CostCurve.of(near, {1: [9.0]}) == CostCurve.of(near)


@pytest.mark.parametrize(("rows", "times"), [((), ()), ((1, 1), (1.0, 2.0)), ((1,), (0.0,)), ((1, 2), (1.0,))])
def test_a_curve_must_be_one(rows: tuple[int, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        CostCurve(rows, times)


def test_measured_once_and_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_transformer()
    curve = cost_curve(model)
    assert curve.rows == cost.ROWS
    assert all(after >= before > 0 for before, after in itertools.pairwise(curve.times))
    monkeypatch.setattr(cost, "_ORDER", None)
    monkeypatch.setattr(cost, "_DISTURBED", 0.0)
    assert cost_curve(tiny_transformer(seed=9)) == curve, "weights do not change the cost"
    (path,) = (home / "cost").iterdir()
    kept = json.loads(path.read_text())
    assert (kept["rows"], kept["seconds"]) == (list(curve.rows), list(curve.times))


def test_info_tells_what_int8_brings(home: Path) -> None:
    assert collect()["int8"] == [
        "reads half of bfloat16's bytes per pass; decodery bench --pass measures what that brings here"
    ]
    dense = tiny_transformer(dtype=torch.float32)
    cost.remember(dense, CostCurve((1, 16), (0.004, 0.019)))
    assert "half" in collect()["int8"][0], "int8 itself is not measured yet"
    whole = tiny_transformer()
    whole.weights.head = Int8Linear.quantize(whole.weights.embedding)
    cost.remember(whole, CostCurve((1, 16), (0.002, 0.017)))
    assert collect()["int8"] == ["ms per pass over 1/8/16 rows: float32 4.0/11.0/19.0, int8 2.0/9.0/17.0"]
    other, _ = sorted((home / "cost").iterdir())
    other.write_text("{}")
    assert "half" in collect()["int8"][0], "a damaged file is left alone"


def test_a_curve_of_a_busy_machine_is_measured_anew(home: Path) -> None:
    model = tiny_transformer(max_positions=2048)
    cost.remember(model, CostCurve((1, 64), (50.0, 90.0)))
    cost._known.clear()
    curve = cost_curve(model)
    assert curve.rows == cost.ROWS and curve.seconds(64) < 50
    cost._known.clear()
    dear = CostCurve((1, 8, 64), (1e-9, 1e-9, 90.0))
    cost.remember(model, dear)
    cost._known.clear()
    assert cost_curve(model) == dear, "slower passes may be a disturbance of now"
    far = CostCurve((1, 8, 64), (1e-9, 1e-9, 90.0), token=1.0)
    cost.remember(model, far)
    cost._known.clear()
    assert cost_curve(model) != far, "a long text was disturbed"


def test_the_first_pass_through_fresh_memory_does_not_make_long_texts_dear(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 1e-3)
    forward, met = clock.model.forward, set()

    def timed(batch, **options):
        cache = batch.segments[0].cache
        if id(cache) not in met:
            met.add(id(cache))
            clock.now += 0.1
        return forward(batch, **options)

    clock.model.forward = timed  # type: ignore[method-assign]
    curve = cost_curve(clock.model)
    assert curve.seconds(8, 4096) == pytest.approx(0.028), "as behind a short text"


def test_another_shape_or_precision_is_measured_anew(home: Path) -> None:
    for model in (
        tiny_transformer(),
        tiny_transformer(num_layers=3),
        tiny_transformer(dtype=torch.float32),
        TableModel(),
    ):
        cost_curve(model)
    assert len(list((home / "cost").iterdir())) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": [1]}', '{"rows": [2, 1], "seconds": [1, 2]}'])
def test_a_damaged_file_is_replaced(home: Path, text: str) -> None:
    cost_curve(tiny_transformer())
    (path,) = (home / "cost").iterdir()
    path.write_text(text)
    curve = cost_curve(tiny_transformer())
    assert json.loads(path.read_text())["rows"] == list(curve.rows)


def test_a_folder_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "file" / "inside"))
    assert cost_curve(TableModel()).seconds(1) > 0


def test_passes_are_timed_behind_the_same_cache() -> None:
    class Watched(TableModel):
        seen: list[tuple[int, int]]

        def forward(self, batch, **options):
            (segment,) = batch.segments
            self.seen.append((int(segment.positions[0]), len(segment)))
            return super().forward(batch, **options)

    model = Watched()
    model.seen = []
    timings = time_passes({"": model}, [8, 1], context=20, enough=lambda done: done >= 3)
    assert {rows: len(times) for rows, times in timings[""].items()} == {1: 3, 8: 3}
    assert sorted(model.seen) == [(20, 1)] * 4 + [(20, 8)] * 4


class Clock:
    """A model whose passes take `seconds` per row, and 20 more rows' time each, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 0.0
        self.model = TableModel()
        forward = self.model.forward
        monkeypatch.setattr(cost, "perf_counter", lambda: self.now)

        def timed(batch, **options):
            self.now += seconds * (20 + batch.rows)
            return forward(batch, **options)

        self.model.forward = timed  # type: ignore[method-assign]


@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 3e-3, 0.01, 0.1])
def test_measuring_is_bounded_whatever_a_pass_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path))
    clock = Clock(monkeypatch, seconds)
    curve = cost_curve(clock.model)
    # A second, or the two passes that make a line.
    assert clock.now <= max(cost._SECONDS, seconds * (21 + 28)) + 1e-9
    assert {1, 8} <= set(curve.rows) <= set(cost.ROWS) == {rows for context, rows in cost._ORDER if context == 128}
    assert [curve.seconds(n) for n in (1, 8, 64)] == pytest.approx([seconds * (20 + n) for n in (1, 8, 64)])
    cost._known.clear()
    before = clock.now
    assert cost_curve(clock.model) == curve, "what was measured is kept, complete or not"
    assert clock.now - before <= max(cost._PROBE_SECONDS, seconds * 21) + 1e-9


def test_a_person_is_told_that_passes_are_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def watching(**options):
        yield lambda *report: said.append(report)

    monkeypatch.setattr(cost.store, "terminal_progress", watching)
    cost_curve(TableModel())
    assert (
        said and {(what, total) for what, _, total in said} == {(said[0][0], len(said))} and "measuring" in said[0][0]
    )
    said.clear()
    cost_curve(TableModel())
    assert not said, "a kept curve is read in silence"


def test_rows_beyond_the_context_are_left_out() -> None:
    model = tiny_transformer(max_positions=32)
    timings = time_passes({"": model}, [1, 16, 64], enough=lambda done: done >= 1)
    assert list(timings[""]) == [1, 16]


def test_bytes_read_are_those_of_layers_norms_and_head() -> None:
    model = tiny_transformer(hidden_size=32, num_layers=2, vocab_size=64)
    layer = (32 + 2 * 16) * 32 + 32 * 32 + 2 * 64 * 32 + 32 * 64
    assert weight_bytes(model) == 8 * (2 * layer + 64 * 32 + 32)  # all norms share one tensor
    assert (precision(model), precision(tiny_transformer(dtype=torch.bfloat16))) == ("float64", "bfloat16")
    assert weight_bytes(TableModel()) == 0


def test_figures_of_passes(home: Path) -> None:
    models = {"float64": tiny_transformer(), "float32": tiny_transformer(dtype=torch.float32)}
    result = passes.measure(models, "tiny", [4, 2], repeats=3)
    assert [(row["precision"], row["rows"]) for row in result["rows"]] == [
        (name, rows) for name in models for rows in (1, 2, 4)
    ]
    assert result["read_gb_per_s"] > 0
    for row in result["rows"]:
        size = weight_bytes(models[row["precision"]])
        assert row["gb_per_s"] == pytest.approx(size / row["ms"] / 1e6, rel=0.05, abs=0.01)
        assert row["bandwidth_share"] == pytest.approx(row["gb_per_s"] / result["read_gb_per_s"], abs=0.01)
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
        one = next(each["ms"] for each in result["rows"] if (each["precision"], each["rows"]) == (row["precision"], 1))
        assert row["ratio_to_one"] == pytest.approx(row["ms"] / one, rel=0.02)
    assert not (home / "cost").exists(), "two rows are no curve"

    path = home / "results.json"
    path.write_text(dump(result))
    assert read(path) == json.loads(json.dumps(result))
    assert table(result).splitlines()[0].startswith("| rows | float64: ms | ")
    assert '"kind": "passes"' in page(result)


def test_a_full_measurement_renews_the_curve(home: Path) -> None:
    model = tiny_transformer()
    passes.measure({"float64": model}, "tiny", passes.ROWS, repeats=1)
    assert cost_curve(model).rows == passes.ROWS


def test_pass_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"kind": "passes", "format": 1, "machine": {}, "model": {}, "rows": []}')
    with pytest.raises(CorruptFile, match="not a result file"):
        read(path)
