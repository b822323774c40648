"""A reward model of its own: what another model says of a text, whoever has written it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decodery.core.ask import drive
from decodery.errors import SettingsError, VocabularyMismatch
from decodery.lm import LM
from decodery.model.load import LoadedModel
from decodery.score import InfAlign, LLMJudge, LogProbability, RewardModel, SelfEvaluation
from decodery.score.base import Candidates, judge
from decodery.search import BestOfN, StepBeam
from decodery.testing import tiny_transformer
from decodery.testing.scripted import ScriptedLM
from serving import VOCAB, tiny_lm

PROMPT, OUTPUTS = [5, 9, 2], [[7, 3, 9], [1], [8] * 20]


def scores(scorer: Any, model: Any) -> list[float]:
    return drive(judge(scorer, Candidates(PROMPT, OUTPUTS, [True] * 3, model=model))).tolist()


def test_it_says_what_its_scorer_says_where_it_is_asked() -> None:
    writer, other = tiny_transformer(0), tiny_transformer(1)
    found = scores(RewardModel(LogProbability("mean"), model=other), writer)
    assert found == pytest.approx(scores(LogProbability("mean"), other))
    # Whoever asks the writer says something else.
    assert found != pytest.approx(scores(LogProbability("mean"), writer), abs=1e-3)


def test_other_tokens_are_read_as_text_and_the_same_ones_as_they_are() -> None:
    lm = tiny_lm()
    made = tiny_transformer(4, vocab_size=VOCAB, max_positions=2048)
    alike = LoadedModel(made, lm.tokenizer, None, "other", "float64")
    told = Candidates(
        lm.encode("once", raw=True),
        [lm.tokenizer.encode(text, special=False) for text in ("upon", "a time")],
        [True, False],
        texts=["upon", "a time"],
        decode=lm.tokenizer.decode,
        model=lm.model,
        begins=[2, 0],
    )
    as_text = RewardModel(LogProbability("sum"), model=alike)
    plain = drive(judge(LogProbability("sum"), replace(told, model=made)))
    # These tokens are bytes, so that text and tokens are the same.
    assert drive(judge(as_text, told)).tolist() == pytest.approx(plain.tolist())
    assert drive(judge(RewardModel(LogProbability("sum"), model=made), told)).tolist() == pytest.approx(plain.tolist())
    with pytest.raises(SettingsError, match="search through `LM`"):
        drive(judge(as_text, replace(told, decode=None)))
    with pytest.raises(VocabularyMismatch):
        drive(judge(RewardModel(LogProbability("sum"), model=tiny_transformer(0)), told))


def test_searches_ask_it_and_its_passes_are_its_own() -> None:
    lm, other = tiny_lm(), tiny_lm()
    asked = LM(LoadedModel(tiny_transformer(4, vocab_size=VOCAB), other.tokenizer, None, "other", "float64"))
    scorer = RewardModel(SelfEvaluation(question=(65, 66), yes=(89,), no=(78,)), model=asked.model)
    for search in (BestOfN(scorer, n=3), StepBeam(scorer, n=2, m=2, delimiter=None, step_tokens=4)):
        best, *others = lm.search("once", search, raw=True, temperature=1.0, max_new_tokens=8)
        passes = best.trace.ledger.passes
        assert passes["reward"] >= 1 and best.trace.ledger.rows["reward"] > 0
        assert all(best.score >= each.score for each in others)
    # Behind a server: nothing is asked of the writer but its texts.
    far = ScriptedLM(lambda each: f"text {each.number}")
    judged = RewardModel(LogProbability("mean"), model=LoadedModel(asked.model, other.tokenizer, None, "o", "float64"))
    assert {each.text for each in far.search("?", BestOfN(judged, n=2), temperature=1.0)} == {"text 0", "text 1"}


@pytest.mark.parametrize("inner", [LLMJudge(), InfAlign(LLMJudge())])
def test_what_asks_the_writer_is_refused(inner: Any) -> None:
    with pytest.raises(SettingsError, match="reads by itself"):
        RewardModel(inner, model=tiny_transformer(0))


def test_it_needs_a_model() -> None:
    with pytest.raises(SettingsError, match="name one, as in model=FOLDER"):
        RewardModel(LogProbability("sum"))
    with pytest.raises(SettingsError, match="given by name"):
        RewardModel(LogProbability("sum"), model=tiny_transformer(0), dtype="int8")
