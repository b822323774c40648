"""The benchmark's arithmetic, on traces made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodery.bench.metrics import (
    FEWEST,
    Timed,
    acceptance,
    histogram,
    macro,
    merge,
    speed_up,
    tokens_per_pass,
    tokens_per_second,
)


def test_a_hand_made_trace() -> None:
    passes = histogram([3, 1, 4, 1])
    assert passes == {1: 2, 3: 1, 4: 1}
    assert tokens_per_pass(passes) == 2.25
    assert acceptance(passes) == [0.5, 1.0, 0.5]


def test_nothing_drafted_is_one_token_per_pass() -> None:
    passes = histogram([1] * 40)
    assert tokens_per_pass(passes) == 1.0
    assert acceptance(passes) == []
    assert tokens_per_pass(histogram([])) == 0.0


def test_depths_at_which_no_pass_ended_count_too() -> None:
    assert acceptance(histogram([1, 4])) == [0.5, 1.0, 1.0]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_tokens_per_pass_is_one_and_the_products_of_acceptances(emitted: list[int]) -> None:
    rates = acceptance(histogram(emitted))
    expected = 1 + sum(math.prod(rates[:depth]) for depth in range(1, len(rates) + 1))
    assert tokens_per_pass(histogram(emitted)) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.lists(st.integers(1, 6), max_size=9), max_size=5))
def test_merging_pools_the_passes(traces: list[list[int]]) -> None:
    assert merge(map(histogram, traces)) == histogram(step for trace in traces for step in trace)


def test_macro_weighs_requests_and_micro_passes() -> None:
    long, short = histogram([1] * 9), histogram([4])
    assert tokens_per_pass(merge([long, short])) == 1.3
    assert macro([tokens_per_pass(long), tokens_per_pass(short)]) == 2.5


def questions(seed: int, cost: float, spread: float, count: int = 30) -> list[Timed]:
    noise = np.random.default_rng(seed).normal(1.0, spread, (count, 3)).clip(0.1)
    return [Timed(20 + index, tuple((cost * row).tolist())) for index, row in enumerate(noise)]


def test_rate_takes_each_questions_median_round() -> None:
    assert tokens_per_second([Timed(10, (0.1, 0.5, 0.2)), Timed(30, (0.1,))]) == pytest.approx(40 / (2.0 + 3.0))
    assert tokens_per_second([]) == 0.0


def test_speed_up_of_plain_decoding_over_itself_is_one() -> None:
    plain = questions(1, 0.01, 0.2)
    result = speed_up(plain, plain)
    assert result is not None
    assert (result.value, result.low, result.high) == (1.0, 1.0, 1.0)


def test_speed_up_that_is_the_same_everywhere_has_no_spread() -> None:
    plain = questions(1, 0.01, 0.2)
    twice = [Timed(each.tokens, tuple(cost / 2 for cost in each.seconds_per_token)) for each in plain]
    result = speed_up(plain, twice)
    assert result is not None
    assert (result.value, result.low, result.high) == pytest.approx((2.0, 2.0, 2.0))


def test_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(100):
        result = speed_up(
            questions(2 * seed, 0.01, 0.3), questions(2 * seed + 1, 0.01 / 1.6, 0.3), seed=seed, draws=300
        )
        assert result is not None
        covered += result.low <= 1.6 <= result.high
    assert 88 <= covered <= 100


def test_more_questions_narrow_the_interval() -> None:
    widths = []
    for count in (10, 160):
        result = speed_up(questions(1, 0.01, 0.3, count), questions(2, 0.006, 0.3, count))
        assert result is not None and result.low < result.value < result.high
        widths.append(result.high - result.low)
    assert widths[1] < widths[0] / 2


def test_the_seed_decides_the_interval() -> None:
    plain, method = questions(1, 0.01, 0.3), questions(2, 0.006, 0.3)
    assert speed_up(plain, method, seed=3) == speed_up(plain, method, seed=3)
    assert speed_up(plain, method, seed=3) != speed_up(plain, method, seed=4)


def test_questions_of_fewer_rounds_keep_their_weight() -> None:
    plain = [Timed(10, (0.01, 0.01, 0.01)), Timed(10, (0.03,))]
    method = [Timed(10, (0.005, 0.005, 0.005)), Timed(10, (0.015,))]
    result = speed_up(plain, method)
    assert result is not None
    assert (result.value, result.low, result.high) == pytest.approx((2.0, 2.0, 2.0))


def test_speed_up_needs_the_same_questions() -> None:
    assert speed_up([], []) is None
    with pytest.raises(ValueError, match="same questions"):
        speed_up(questions(1, 0.01, 0.1, 3), questions(1, 0.01, 0.1, 4))


def test_a_handful_of_questions_has_no_interval() -> None:
    few = speed_up(questions(1, 0.01, 0.3, FEWEST - 1), questions(2, 0.006, 0.3, FEWEST - 1))
    enough = speed_up(questions(1, 0.01, 0.3, FEWEST), questions(2, 0.006, 0.3, FEWEST))
    assert few is not None and few.low == few.value == few.high
    assert enough is not None and enough.low < enough.value < enough.high
