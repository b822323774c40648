"""Searches that stop sampling, or drop samples, by what a scorer says while they are drawn."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.sampling import Sampler
from decodery.search.adaptive_sampling import AdaptiveSampling, at_share
from decodery.search.best_of_n import BestOfN
from decodery.search.early_pruning import EarlyPruning
from decodery.step.scorer import Candidates
from decodery.testing.models import Counted
from decodery.training.value import beside_others, not_better
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.puzzles.scripted import ScriptedChain
from decodery_benchmarks.training.prm import PRMRecipe, labelled
from methods import DRAFTERS, Even
from sampled import MODEL, OTHER, Constant, Failing, plain, run, told, written_of


class Listed(Even):
    """Even, and remembers every text it is asked about."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, tuple[int, ...]]] = []

    def score(self, candidates: Candidates) -> torch.Tensor:
        self.seen += zip(candidates.finished, map(tuple, candidates.outputs), strict=True)
        return super().score(candidates)


@cache
def _drawn(n: int, seed: int) -> list[list[int]]:
    return plain(n, seed=seed)


def adaptive(scorer: Any, **settings: Any) -> AdaptiveSampling:
    return AdaptiveSampling(scorer, **{"schedule": "constant"} | settings)


@pytest.mark.parametrize("drafter", [None, "draft-model"])
def test_texts_are_drawn_until_one_is_good_enough(drafter: str | None) -> None:
    settings: dict[str, Any] = {"drafter": DRAFTERS[drafter](OTHER)} if drafter else {}
    stopped = set()
    for seed in range(2):
        texts = _drawn(8, seed)
        drawn = [_even(written_of(text)) for text in texts]
        for width in (1, 3):
            threshold = sorted(drawn)[5]
            judge = Listed()
            found = run(adaptive(judge, n=8, threshold=threshold, width=width), seed=seed, **settings)
            first = next(number for number, score in enumerate(drawn) if score >= threshold)
            rounds = min(8, (first // width + 1) * width)
            assert found[0].trace.ledger.counts["drawn"] == rounds
            # What is returned is the best of these draws, of equals the first, and nothing else was written or judged.
            assert found[0].generated == texts[drawn.index(max(drawn[:rounds]))]
            assert len(found) == rounds
            assert found[0].trace.ledger.tokens == sum(map(len, texts[:rounds]))
            assert set(judge.seen) == {(True, tuple(written_of(text))) for text in texts[:rounds]}
            assert len(judge.seen) == len(set(judge.seen))
            stopped.add(rounds)
    assert len(stopped) > 1


def test_its_ends_are_one_text_and_best_of_n() -> None:
    everything = run(adaptive(Even(), n=6, threshold=2e9))
    assert told(everything) == told(run(BestOfN(Even(), n=6)))
    assert len(run(adaptive(Even(), n=6, threshold=-2e9))) == 1
    # A rule that stops at what is not good enough is told from this one.
    assert run(adaptive(Constant(), n=6, threshold=0.5))[0].trace.ledger.counts["drawn"] == 6
    assert run(adaptive(Constant(), n=6, threshold=0.4))[0].trace.ledger.counts["drawn"] == 1


def test_the_first_text_is_greedy_and_later_ones_are_warmer() -> None:
    found = run(AdaptiveSampling(Constant(), n=3, threshold=2.0))
    # Of equal scores the text drawn first wins: they stand in the order they were drawn.
    wanted = [plain(3, sampler=Sampler.from_settings(temperature=t))[n] for n, t in enumerate((0.0, 0.5, 0.75))]
    assert [seq.generated for seq in found] == wanted and wanted != plain(3)
    processors = [Sampler(["top-p:p=0.9"]), Sampler(["temperature:t=0.5", "top-p:p=0.9"])]
    assert [repr(at_share(each, 0.5).processors) for each in processors] == [
        repr(Sampler([f"temperature:t={t}", "top-p:p=0.9"]).processors) for t in (0.5, 0.25)
    ]
    model = Counted(MODEL)
    (greedy,) = run(AdaptiveSampling(Constant(), n=9, threshold=2.0), model, sampler=Sampler.from_settings())
    assert [greedy.generated] == plain(1, sampler=Sampler.from_settings())


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_text_without_a_score_is_left_and_sampling_goes_on(how: str) -> None:
    texts = plain(6)
    bad = [number for number, text in enumerate(texts) if text[0] % 2 == 0]
    assert 0 < len(bad) < 6
    with pytest.warns(UserWarning, match=f"{len(bad)} of 6 texts are left out"):
        found = run(adaptive(Failing(how), n=6, threshold=2e9))
    assert len(found) == 6 - len(bad) and found[0].trace.ledger.counts["unscored"] == len(bad)
    with pytest.raises((RuntimeError, SettingsError)):
        run(adaptive(Failing(how), n=1), seed=7 + bad[0])


def test_pruned_texts_stop_early_and_the_others_are_what_they_would_be() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "eos_ids": (0,)}
    kept_back = 0
    for seed in range(2):
        texts, judge = plain(6, seed=seed, **settings), Listed()
        found = run(EarlyPruning(judge, n=6, after=5, keep=0.4), seed=seed, **settings)
        partial = {text for finished, text in judge.seen if not finished}
        assert partial == {tuple(text[:5]) for text in texts if len(text) > 5}
        going = [text for text in texts if len(text) > 5]
        order = sorted(range(len(going)), key=lambda n: -_even(going[n][:5]))
        kept = [going[n] for n in order[: -(-len(going) * 2 // 5)]] + [text for text in texts if len(text) <= 5]
        assert sorted(seq.generated for seq in found) == sorted(kept)
        ledger = found[0].trace.ledger
        assert ledger.counts["pruned"] == len(texts) - len(kept)
        assert ledger.tokens == sum(map(len, kept)) + 5 * (len(texts) - len(kept))
        kept_back += len(texts) - len(kept)
    assert kept_back > 4
    assert told(run(EarlyPruning(Even(), n=4, keep=1.0))) == told(run(BestOfN(Even(), n=4)))
    # It looks at drafted texts once their drafts are in, at the latest.
    found = run(EarlyPruning(Even(), n=4, after=5, keep=0.5), drafter=DRAFTERS["draft-model"](OTHER), **settings)
    assert {tuple(seq.generated) for seq in found} <= set(map(tuple, plain(4, **settings)))


def _even(tokens: list[int]) -> float:
    return float(Even().score(Candidates([], [tokens], [False]))[0])


def test_a_text_is_labelled_by_how_few_others_are_better(tmp_path: Path) -> None:
    assert not_better([0, 0, 0]) == [1, 1, 1]
    assert not_better([1, 0, 0, 1, 0]) == [1, 0.5, 0.5, 1, 0.5]
    assert not_better([3.0, 1.0, 2.0]) == [1, 0, 0.5]
    judged = [("a", "x", 1.0), ("b", "y", 0.0), ("a", "z", 0.0), ("b", "w", 0.0)]
    assert beside_others(judged) == [("a", "x", 1.0), ("b", "y", 1.0), ("a", "z", 0.0), ("b", "w", 1.0)]
    with pytest.raises(SettingsError, match="at least two"):
        not_better([1])
    chain, double = puzzle("chain:operations=2"), ScriptedChain(0.4, 2)
    recipe = PRMRecipe(problems=10, solutions=4, labels="restart")
    found = labelled(double, chain, tmp_path, recipe)
    for _, group in itertools.groupby(found, lambda example: example.problem):
        own = list(group)
        right = [chain.verify(each.prompt, each.text) for each in own]
        # All samples are there, as often as they were drawn, and their steps have one label.
        assert len(own) == 4 and sum(each.tokens > 0 for each in own) == 1
        for each, sound in zip(own, right, strict=True):
            assert each.labels == ((1 if sound else (3 - sum(right)) / 3),) * 3
    with pytest.raises(SettingsError, match="at least 2"):
        PRMRecipe(solutions=1, labels="restart")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: AdaptiveSampling(Even(), n=0), "n of at least 1"),
        (lambda: AdaptiveSampling(Even(), threshold=float("nan")), "a finite number"),
        (lambda: AdaptiveSampling(Even(), schedule="falling"), "rising or constant"),  # type: ignore[arg-type]
        (lambda: EarlyPruning(Even(), keep=0.0), "above 0"),
        (lambda: EarlyPruning(Even(), after=0), "at least 1"),
    ],
)
def test_bad_settings_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        wrong()
