"""Truncations against a plain reference and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from covering import FULL
from decodery.sampling import LogitsProcessor, TopK, TopP, Typical
from decodery.sampling import top_p as top_p_file
from decodery.sampling import typical as typical_file
from decodery.sampling.prefix import smallest_prefix
from plain_processors import (
    ROWS,
    TRUNCATIONS,
    V,
    contexts_for,
    distinct_rows,
    kept,
)

NAMES = [repr(case[0]) for case in TRUNCATIONS]


@pytest.mark.parametrize(("processor", "reference", "setting", "peer"), TRUNCATIONS, ids=NAMES)
def test_truncations_equal_the_plain_reference(
    processor: LogitsProcessor, reference: Callable[[list[float], Any], set[int]], setting: Any, peer: object
) -> None:
    rows = ROWS if FULL else ROWS[::4]
    before = rows.clone()
    result = processor.process(rows, contexts_for(len(rows)))
    assert torch.equal(rows, before), "a processor must not change what it is given"
    for row, found, warped in zip(rows, kept(result), result, strict=True):
        expected = reference(row.tolist(), setting)
        if not isinstance(processor, TopP | TopK):
            # float32 probabilities vanish where exact ones do not; both documents keep nothing that has none.
            expected = {i for i in expected if row[i] > row.max() - 80}
            found = {i for i in found if row[i] > row.max() - 80}
        assert found == expected
        assert torch.equal(warped[list(found)], row[list(found)])


@pytest.mark.parametrize(("processor", "reference", "setting", "peer"), TRUNCATIONS, ids=NAMES)
@pytest.mark.parametrize("size", [V, 3000])
def test_truncations_equal_transformers(
    processor: LogitsProcessor, reference: object, setting: object, peer: hf.LogitsProcessor, size: int
) -> None:
    rows = ROWS if size == V else distinct_rows(60, size, seed=3)
    ids = torch.zeros(len(rows), 1, dtype=torch.int64)
    ours, theirs = processor.process(rows, contexts_for(len(rows))), peer(ids, rows.clone())
    if isinstance(processor, TopP):
        # Among equals at the border transformers keeps whichever its sort left there: compare what is kept by value.
        ours, theirs = ours.sort(dim=-1).values, theirs.sort(dim=-1).values
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [40, 700, 20_000])
@pytest.mark.parametrize("share", [0.05, 0.9, 0.99])
def test_narrowing_down_equals_a_full_sort(size: int, share: float) -> None:
    rows = distinct_rows(18, size, seed=5)
    rows = torch.cat([rows, (rows[:6] * 2).round() / 2, torch.zeros(1, size)])
    context = contexts_for(len(rows))
    assert torch.equal(TopP(share).process(rows, context), top_p_file.keep_prefix(rows, share))
    log_probs = rows.log_softmax(dim=-1)
    expected = typical_file.entropy(log_probs)
    by_sort = typical_file._keep_nearest(rows, log_probs, expected, share)
    assert torch.equal(Typical(share).process(rows, context), by_sort)


@given(
    st.lists(st.tuples(st.integers(-40, 40), st.integers(1, 8)), min_size=1, max_size=80),
    st.integers(1, 25),
    st.floats(0.01, 1.0),
)
def test_the_smallest_prefix_is_the_smallest(pairs: list[tuple[int, int]], copies: int, share: float) -> None:
    # Weights are integers, so that sums are exact whatever their order.
    keys = np.array([key for key, _ in pairs] * copies, dtype=np.float32)
    weights = np.array([weight for _, weight in pairs] * copies, dtype=np.float32)
    goal = share * float(weights.sum())
    last, needed = smallest_prefix(keys, weights, goal)
    order = keys.argsort(kind="stable")
    count = int(weights[order].cumsum().searchsorted(goal)) + 1
    assert last == keys[order][count - 1]
    assert needed == int((keys[order][:count] == last).sum())


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    row = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    # Two tokens of mass 0.288 and four of 0.106: 0.7 needs two of the four.
    assert kept(TopP(0.7).process(row, contexts_for(1))) == [{0, 1, 2, 3}]


def test_the_crossing_token_stays_and_rounding_drops_nothing() -> None:
    halves = torch.tensor([[2.0, 1.0, 1.0]]).log()
    assert kept(TopP(0.5).process(halves, contexts_for(1))) == [{0}]
    assert kept(TopP(0.5000001).process(halves, contexts_for(1))) == [{0, 1}]
    flat = torch.zeros(1, 49_152)
    for share in (1 - 1e-12, math.nextafter(1.0, 0.0)):
        assert len(kept(TopP(share).process(flat, contexts_for(1)))[0]) >= 49_151
        assert len(kept(Typical(share).process(flat, contexts_for(1)))[0]) == 49_152


def test_typical_may_drop_the_most_probable_token() -> None:
    probs = torch.tensor([[0.4] + [0.6 / 30] * 30]).log()
    assert 0 not in kept(Typical(0.3).process(probs, contexts_for(1)))[0]
