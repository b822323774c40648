"""What searches are tuned by: the law of a context's split, and the best layers of a pipeline."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.search import Archon, ContextLaw, Split, SplitResult, best_archons
from scripted_lm import ScriptedLLM

SPLITS = [Split(k, m, n) for k, m, n in product((0, 1, 5, 20), (0, 1, 4), (0, 1, 3))]
KINDS = ((0.1, 0.02), (0.3, 0.05), (0.2, 0.2))


def test_a_planted_law_is_found_again_and_chooses_as_all_splits_tried_would() -> None:
    law = ContextLaw((0.2, 0.05, 0.1), (0.4, -1.5), -0.3)
    trials = [
        SplitResult(split, law.accuracy(split, document=document, example=example), document, example)
        for split in SPLITS
        for document, example in KINDS
    ]
    found = ContextLaw.fit(trials)
    planted = [*law.a, *law.b, law.c]
    assert np.allclose([*found.a, *found.b, found.c], planted, atol=1e-6)
    short = [split for split in SPLITS if (1 + split.m) * split.k * 100 <= 2500]
    for document, example in KINDS:
        known = {each.split: each.accuracy for each in trials if (each.document, each.example) == (document, example)}
        best = found.best(short, document=document, example=example)
        assert known[best] == max(known[split] for split in short)
    # Examples harm where one alone gains much, by this law; who leaves the gains out does not see it.
    assert [found.best(SPLITS, document=0.2, example=each).m for each in (0.0, 0.2)] == [4, 0]
    blind = ContextLaw.fit([SplitResult(each.split, each.accuracy, 0.0, 0.0) for each in trials])
    assert not np.allclose([*blind.a, *blind.b, blind.c], planted, atol=1e-2)


def test_what_makes_no_law_is_refused() -> None:
    with pytest.raises(SettingsError, match="needs as many trials, not 1"):
        ContextLaw.fit([SplitResult(Split(1), 0.5, 0.1, 0.1)])
    with pytest.raises(SettingsError, match="0 or more"):
        Split(-1)
    with pytest.raises(SettingsError, match="no split fits"):
        ContextLaw((0, 0, 0), (0, 0), 0).best([], document=0.0, example=0.0)


def _worth(search: Archon) -> float:
    """Best are six texts, a critic, three of them kept and one layer of two fusers."""
    text = str(search.layers)
    samples = int(text.split("generator(n=")[1].split(")")[0])
    kept = int(text.split("top_k=")[1].split(")")[0]) if "top_k" in text else 0
    found = -abs(samples - 6) / 4 - abs(kept - 3) / 2 + ("critic" in text) - ("verifier" in text) / 2
    return found - ("unit-tests" in text) / 2 - abs(text.count("fuser") - 2) / 2 + 0.5 * ("fuser(n=2)" in text)


@pytest.mark.integration
def test_the_best_pipeline_is_found_within_few_tries() -> None:
    calls = 12
    best = best_archons(_worth, most_calls=calls, evaluations=10**6, how="random")

    def top(how: str, seed: int) -> float:
        return best_archons(_worth, most_calls=calls, evaluations=40, how=how, seed=seed)[0].score  # type: ignore[arg-type]

    assert len(best) > 600 and all(top("bayesian", seed) == best[0].score for seed in range(4))
    # As many that are drawn do not have it among them.
    assert all(top("random", seed) < best[0].score for seed in range(4))
    found = best_archons(_worth, most_calls=calls, how="greedy")
    # One choice after the other ends where no single one is better.
    assert 1 <= found[0].score <= best[0].score and len({each.search for each in found}) == len(found)
    assert max(each.search.cost() for each in found) <= calls
    asked = ScriptedLLM(lambda each: "[1] fine\n[2] fine\n[3] fine\n[4] fine\n[5] fine\n[6] fine")
    asked.search("Why?", found[0].search)
    assert len(asked.asked) <= calls
    # What would cost more is never asked about, and of nothing there is no best.
    assert {each.search.cost() for each in best_archons(_worth, most_calls=1)} == {1}
    with pytest.raises(SettingsError, match="allow more"):
        best_archons(_worth, most_calls=0)
