"""Prompts are read in chunks that keep a pass short for those who write; the clock is the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from decodery.core.errors import SettingsError
from decodery.engine import accounting as account
from decodery.engine import pass_runner
from decodery.engine.engine import Engine
from decodery.engine.pace import LEAST_ROWS, Pace
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.batch import Batch, Scores
from decodery.testing import tiny_transformer
from decodery.testing.models import to_int8

MODEL = to_int8(tiny_transformer(0))
LONG = [[(7 * number + at * at) % 60 + 1 for at in range(450)] for number in range(3)]
PASS, ROW, TOKEN = 0.02, 0.004, 0.0001
"""Seconds of a pass, of every row in it and of every token that one attends to."""
BOUND = 0.8


@dataclass(eq=False)
class Timed:
    """A model whose passes take exactly so long on a clock of their own. seconds, rows: of each pass."""

    now: float = 0.0
    seconds: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(MODEL, name)

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        took = PASS + sum(ROW * len(each) + TOKEN * float(each.positions.sum()) for each in batch.segments)
        self.now += took
        self.seconds.append(took)
        self.rows.append(batch.rows)
        return MODEL.forward(batch, **settings)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Timed:
    timed = Timed()
    for module in (pass_runner, account):
        monkeypatch.setattr(module, "perf_counter", lambda: timed.now)
    return timed


class Flat(Pace):
    """A wrong pace: it takes all rows for equally dear, however long their texts are."""

    def learn(self, rows: int, attended: int, seconds: float) -> None:
        super().learn(rows, 0, seconds)


def read_beside_a_writer(model: Timed, pace: Pace, seconds: float | None) -> list[list[int]]:
    """The texts, where three long prompts arrive while one text writes."""
    running = Engine(model, prefill_chunk=256, limits=Limits(seconds=seconds))
    running._schedule.pace = pace
    texts = [running.submit(Request([5, 6, 7], max_new_tokens=120))]
    running.step()
    model.seconds.clear(), model.rows.clear()
    texts += [running.submit(Request(prompt, max_new_tokens=4)) for prompt in LONG]
    running.run(texts)
    return [text.generated for text in texts]


def late(model: Timed) -> list[float]:
    """Passes that took much longer than they may; the first four are for learning."""
    return [took for took, rows in zip(model.seconds[4:], model.rows[4:], strict=True) if took > 1.25 * BOUND]


def test_passes_keep_their_time_while_somebody_writes(model: Timed) -> None:
    read_beside_a_writer(model, Pace(), BOUND)
    assert not late(model)
    # Nor is reading put off: as long as there is enough to read, the time is used.
    reading = [took for took, rows in zip(model.seconds[4:], model.rows[4:], strict=True) if rows > LEAST_ROWS]
    assert len(reading) > 10
    assert sorted(reading)[len(reading) // 2] > 0.75 * BOUND


def test_a_pace_blind_to_length_is_late(model: Timed) -> None:
    read_beside_a_writer(model, Flat(), BOUND)
    assert late(model)


def test_without_a_bound_who_writes_waits_for_whole_chunks(model: Timed) -> None:
    read_beside_a_writer(model, Pace(), None)
    assert max(model.seconds) > 10 * BOUND


def test_texts_do_not_depend_on_chunks(model: Timed) -> None:
    whole = read_beside_a_writer(model, Pace(), None)
    passes = len(model.rows)
    for bound in (BOUND, 1e-9):
        model.rows.clear()
        assert read_beside_a_writer(model, Pace(), bound) == whole
        assert len(model.rows) >= passes
    # Even where no time is left for it, who has waited longest reads a few rows.
    assert sum(rows == LEAST_ROWS + 1 for rows in model.rows) > 50


def test_nobody_is_waited_for_where_nobody_writes(model: Timed) -> None:
    running = Engine(model, prefill_chunk=256, limits=Limits(seconds=1e-9))
    running.run([running.submit(Request(prompt, max_new_tokens=1)) for prompt in LONG])
    assert model.rows == [768, 582]


def test_a_pace_knows_what_it_has_seen() -> None:
    pace = Pace()
    assert pace.rows(0.1, 1000) == inf
    assert pace.seconds(10, 1000) == 0.0
    for rows, before in ((64, 0), (128, 100), (32, 2000)):
        pace.learn(rows, rows * before + rows * rows // 2, rows * (ROW + TOKEN * (before + rows / 2)))
    for before in (0, 500, 4000):
        assert pace.seconds(20, before) == pytest.approx(20 * (ROW + TOKEN * (before + 10)))
        assert pace.seconds(1, before) * pace.rows(0.5, before) < 0.5 * 1.01
        fit = pace.rows(0.5, before)
        assert fit * (ROW + TOKEN * (before + fit / 2)) == pytest.approx(0.5)
    assert pace.rows(-0.1, 0) == 0


@pytest.mark.parametrize("passes", [[(50, 100, 1.0), (50, 5000, 0.1)], [(50, 100, 0.001), (50, 5000, 10.0)]])
def test_a_row_never_costs_less_than_nothing(passes: list[tuple[int, int, float]]) -> None:
    pace = Pace()
    for seen in passes:
        pace.learn(*seen)
    assert 0 < pace.rows(0.5, 3000) < inf
    assert pace.seconds(1, 0) >= 0
    assert pace.seconds(1, 3000) >= pace.seconds(1, 0)


def test_a_bound_of_no_time_is_refused() -> None:
    with pytest.raises(SettingsError, match="more than 0 seconds"):
        Limits(seconds=0)
