"""Log-probabilities of texts that grow by steps: those of the whole texts, and each token is read once."""

from __future__ import annotations

from typing import Any

import pytest

from decodery.models.protocol import LanguageModel
from decodery.scorers import LogProbability, Product, RewardModel, log_probability
from decodery.search import StepBeam
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, Scorer, judge
from serving import tiny_lm

LM = tiny_lm()
PROMPT = LM.encode("What is 2 + 2?")


def grown(scorer: Scorer) -> list[Any]:
    """What a search over six steps finds."""
    search = StepBeam(scorer, n=4, m=2, rounds=6, step_tokens=8, delimiter=None)
    return LM.search("What is 2 + 2?", search, temperature=1.0, max_new_tokens=64, seed=3, ignore_eos=True)


def read_whole(scorer: Scorer, tokens: list[int], model: LanguageModel) -> float:
    return float(run_sync(judge(scorer, Candidates(PROMPT, [tokens], [True], model=model)))[0])


@pytest.mark.parametrize("of", ["mean", "sum", "min"])
def test_a_text_that_grows_has_the_score_of_the_whole_text(of: Any) -> None:
    found = grown(LogProbability(of))
    for out in found:
        assert out.score == pytest.approx(read_whole(LogProbability(of), out.tokens, LM.model))
    # Each token is written once and read once more; whole texts in every step would be three times that.
    ledger = found[0].trace.ledger
    assert ledger.rows["model"] <= len(PROMPT) + 2 * ledger.tokens + ledger.scorer_calls


def test_what_is_kept_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    remember = log_probability._remember

    def watched(candidates: Candidates, found: Any) -> None:
        remember(candidates, found)
        if candidates.calls is not None:
            sizes.append(len(log_probability._remembered(candidates.calls)))

    monkeypatch.setattr(log_probability, "_KEPT", 0)
    monkeypatch.setattr(log_probability, "_remember", watched)
    found = grown(LogProbability())
    # Six steps of four texts.
    assert len(sizes) >= 6 and max(sizes) == 8
    for out in found:
        assert out.score == pytest.approx(read_whole(LogProbability(), out.tokens, LM.model))
    ledger = found[0].trace.ledger
    assert ledger.rows["model"] <= len(PROMPT) + 2 * ledger.tokens + ledger.scorer_calls


def test_two_models_are_not_taken_for_each_other() -> None:
    models = [tiny_lm(seed=seed).model for seed in (2, 3)]
    scorer = LogProbability()
    for out in grown(Product(tuple(RewardModel(scorer, model=model) for model in models))):
        apart = [read_whole(scorer, out.tokens, model) for model in models]
        assert out.score == pytest.approx(sum(apart)) and abs(apart[0] - apart[1]) > 1e-3
