"""Which way texts that share passes go, by the clock."""

from __future__ import annotations

import numpy as np
import pytest

from decodery.speculative.draft_length.trials import Trials


def steps(trials: Trials, texts: int, count: int, seconds: dict[bool, float], tokens: dict[bool, float]) -> list[bool]:
    """Which way each of `count` steps went, of which every way takes so long and gives so many tokens a text."""
    generator, ways = np.random.default_rng(0), []
    for _ in range(count):
        drafts = trials.drafts(texts)
        took = seconds[drafts] * generator.normal(1, 0.05) * (6 if generator.random() < 0.02 else 1)
        for _ in range(texts):
            trials.learn(texts, drafts, took, 1 + int(generator.random() < tokens[drafts] - 1))
        ways.append(drafts)
    return ways


@pytest.mark.parametrize("texts", [2, 3, 16])
@pytest.mark.parametrize("slow", [1.0, 1.6])
def test_the_faster_way_is_gone_nearly_always(texts: int, slow: float) -> None:
    """1.3 tokens for 1 pass pay, for 1.6 they do not."""
    ways = steps(Trials(), texts, 600, {True: slow, False: 1.0}, {True: 1.3, False: 1.0})
    assert np.mean([way == (slow < 1.3) for way in ways]) > 0.93


def test_what_was_slower_is_tried_again() -> None:
    trials = Trials()
    steps(trials, 4, 300, {True: 2.0, False: 1.0}, {True: 1.3, False: 1.0})
    ways = steps(trials, 4, 900, {True: 1.0, False: 1.0}, {True: 1.8, False: 1.0})
    assert np.mean(ways[-200:]) > 0.9


def test_numbers_of_texts_are_told_apart() -> None:
    trials = Trials()
    steps(trials, 16, 300, {True: 2.0, False: 1.0}, {True: 1.1, False: 1.0})
    assert trials.drafts(2) and not trials.drafts(16)
