"""A reward model of its own: what another model says of a text, whoever has written it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from decodery.core.errors import SettingsError, VocabularyMismatch
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.chat import ChatTemplate
from decodery.scorers import InfAlign, LLMJudge, LogProbability, RewardModel, SelfEvaluation
from decodery.scorers.reading import read
from decodery.search import BestOfN, StepBeam
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from decodery.testing import tiny_transformer
from decodery.testing.models import Counted
from scripted_lm import ScriptedLLM
from serving import VOCAB, tiny_lm

PROMPT, OUTPUTS = [5, 9, 2], [[7, 3, 9], [1], [8] * 20]


def scores(scorer: Any, model: Any) -> list[float]:
    return run_sync(judge(scorer, Candidates(PROMPT, OUTPUTS, [True] * 3, model=model))).tolist()


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
        lm.encode("once", apply_chat_template=False),
        [lm.tokenizer.encode(text, special=False) for text in ("upon", "a time")],
        [True, False],
        texts=["upon", "a time"],
        decode=lm.tokenizer.decode,
        model=lm.model,
        begins=[2, 0],
    )
    as_text = RewardModel(LogProbability("sum"), model=alike)
    plain = run_sync(judge(LogProbability("sum"), replace(told, model=made)))
    # These tokens are bytes, so that text and tokens are the same.
    assert run_sync(judge(as_text, told)).tolist() == pytest.approx(plain.tolist())
    assert run_sync(judge(RewardModel(LogProbability("sum"), model=made), told)).tolist() == pytest.approx(
        plain.tolist()
    )
    with pytest.raises(SettingsError, match="search through `LLM`"):
        run_sync(judge(as_text, replace(told, decode=None)))
    with pytest.raises(VocabularyMismatch):
        run_sync(judge(RewardModel(LogProbability("sum"), model=tiny_transformer(0)), told))


def test_searches_ask_it_and_its_passes_are_its_own() -> None:
    lm, other = tiny_lm(), tiny_lm()
    asked = LLM(LoadedModel(tiny_transformer(4, vocab_size=VOCAB), other.tokenizer, None, "other", "float64"))
    scorer = RewardModel(SelfEvaluation(question=(65, 66), yes=(89,), no=(78,)), model=asked.model)
    for search in (BestOfN(scorer, n=3), StepBeam(scorer, n=2, m=2, delimiter=None, step_tokens=4)):
        best, *others = lm.search("once", search, apply_chat_template=False, temperature=1.0, max_new_tokens=8)
        passes = best.trace.ledger.passes
        assert passes["reward"] >= 1 and best.trace.ledger.rows["reward"] > 0
        assert all(best.score >= each.score for each in others)
    # After a server: nothing is asked of the writer but its texts.
    far = ScriptedLLM(lambda each: f"text {each.number}")
    judged = RewardModel(LogProbability("mean"), model=LoadedModel(asked.model, other.tokenizer, None, "o", "float64"))
    assert {each.text for each in far.search("?", BestOfN(judged, n=2), temperature=1.0)} == {"text 0", "text 1"}


def test_what_asks_the_writer_is_refused() -> None:
    with pytest.raises(SettingsError, match="reads by itself"):
        RewardModel(InfAlign(LLMJudge()), model=tiny_transformer(0))


def test_it_needs_a_model() -> None:
    with pytest.raises(SettingsError, match="name one, as in model=FOLDER"):
        RewardModel(LogProbability("sum"))
    with pytest.raises(SettingsError, match="given by name"):
        RewardModel(LogProbability("sum"), model=tiny_transformer(0), dtype="int8")


def test_a_second_model_judges_behind_a_prompt_of_its_own() -> None:
    lm, template = tiny_lm(max_positions=2048), ChatTemplate("<{{ messages[0]['content'] }}>")
    made = LoadedModel(
        tiny_transformer(4, vocab_size=VOCAB, max_positions=2048), lm.tokenizer, template, "o", "float64"
    )
    scorer = RewardModel(LLMJudge(labels=("no", "maybe", "yes")), model=made)

    def law(text: str, model: Any, spelt: str) -> float:
        ids = lm.tokenizer.encode(spelt.format(f"Question:\nIs it?\n\nAnswer:\n{text}\n\n{LLMJudge().instruction}"))
        logits = model.forward(Batch([Segment.chunk(ids, model.new_cache(), logit_rows=[len(ids) - 1])])).logits[0]
        weights = logits.double().softmax(0)[[ord(letter) for letter in "nmy"]]
        return float((weights[1] / 2 + weights[2]) / weights.sum())

    found = lm.search("Is it?", BestOfN(scorer, n=3), apply_chat_template=False, temperature=1.0, max_new_tokens=6)
    for output in found:
        assert output.score == pytest.approx(law(output.text, made.model, "<{}>"), abs=1e-9)
        # Neither the writer nor a prompt without the template of the judge says so.
        assert abs(output.score - law(output.text, lm.model, "<{}>")) > 1e-4
        assert abs(output.score - law(output.text, made.model, "{}")) > 1e-4
    ledger = found[0].trace.ledger
    # What the prompts of the judge begin with is read once for the three.
    common = len(lm.tokenizer.encode("<Question:\nIs it?\n\nAnswer:\n"))
    assert common * 2 <= ledger.counts["judge_tokens_in"] - ledger.rows["reward"] < common * 2 + 12
    assert ledger.passes["reward"] > 0
    # Named without a tokenizer, the judge has the writer's.
    alike = RewardModel(LLMJudge(labels=("no", "maybe", "yes")), model=made.model)
    (best, *_) = lm.search("Is it?", BestOfN(alike, n=2), apply_chat_template=False, temperature=1.0, max_new_tokens=6)
    assert best.score == pytest.approx(law(best.text, made.model, "{}"), abs=1e-9)
    # After a server, too, which is asked for texts alone.
    far = ScriptedLLM(lambda each: f"text {each.number}")
    outputs = far.search("Is it?", BestOfN(scorer, n=2), temperature=1.0)
    assert all(each.score == pytest.approx(law(each.text, made.model, "<{}>"), abs=1e-9) for each in outputs)
    assert len(far.asked) == 2


def test_what_texts_begin_with_is_read_once() -> None:
    model = Counted(tiny_transformer(1))
    begun = [number % 60 for number in range(88)]
    texts = [[*begun, number, 7] for number in range(3, 6)]

    def values(chosen: list[list[int]], wanted: int = 1) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in chosen]

        def take(number: int, row: int, logits: torch.Tensor) -> None:
            found[number] += logits.sum(dim=-1).tolist()

        alone = Candidates((), [()] * len(chosen), [True] * len(chosen), model=model)
        model.rows.clear()
        run_sync(read(alone, model, chosen, [wanted] * len(chosen), take))
        return found

    together = values(texts)
    # The common part once, and then two rows of each; a text alone is read as it is.
    assert sum(model.rows) == 88 + 2 * 3
    for text, value in zip(texts, together, strict=True):
        assert values([text])[0] == pytest.approx(value, abs=1e-9) and sum(model.rows) == 90
    # Rows that are wanted are not left out, however much is common.
    assert [len(each) for each in values([texts[0]] * 2, 90)] == [90, 90]
