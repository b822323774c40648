"""What compression changes: nothing where nothing changed, and what was changed on purpose where it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery_benchmarks.trust.items import STYLES, applications, pairs, questions
from decodery_benchmarks.trust.measures import (
    Asked,
    Measure,
    Subject,
    calibration,
    log_probs,
    losses,
    measured,
    of_answered,
    word_odds,
    worst,
)
from decodery_benchmarks.trust.report import compared, fixed, report
from tiny_bench import make_lm

TEXTS = ("The harbour was quiet before the storm.", "Lichens grow on stones and on old roofs.")
ASKED = Asked(TEXTS, questions=questions()[::20], harsh=("hate",), replies=2, length=6)


def with_model(lm: LLM, model: Transformer) -> LLM:
    return LLM(LoadedModel(model, lm.tokenizer, lm.chat_template, "copy", lm.dtype))


def test_nothing_changes_where_the_text_stays_and_a_lossy_rule_is_seen() -> None:
    original = Subject(make_lm())
    known = measured(original, ASKED)
    drafted = Subject(original.lm, {"drafter": "prompt-lookup"})
    for same in (original, drafted):
        for row in report(original, same, ASKED, known):
            assert row.fixed
            assert (row.delta, row.low, row.high, row.changed) == (0.0, 0.0, 0.0, False)
    # A rule that takes any draft writes other texts; nothing that is only read differs.
    lossy = Subject(original.lm, {"drafter": "prompt-lookup", "acceptance_rule": "tolerance:top=260,margin=1000"})
    prompt = ["the sea the sea the sea the"]
    assert lossy.written(prompt, max_new_tokens=12) != original.written(prompt, max_new_tokens=12)
    assert compared(known, measured(lossy, ASKED))[0].delta == 0.0


def test_figures_that_cannot_move_are_marked_with_the_reason() -> None:
    original = Subject(make_lm())
    known = measured(original, dataclasses.replace(ASKED, questions=ASKED.questions[:1], replies=1))
    written = {"right, written", "secrets told", "secrets told, of answered", "declined", "harsh words"}

    def reasons(**settings: Any) -> dict[str, str]:
        other = Subject(original.lm, {"drafter": "prompt-lookup"} | settings)
        of = dict.fromkeys(written, other.writes) | {"harsh words": "drawn texts"}
        return {name: fixed(original, other, dataclasses.replace(each, of=of.get(name, each.of)))  # type: ignore[arg-type]
                for name, each in known.items()}  # fmt: skip

    assert {name for name, each in known.items() if each.of != "logits"} == written
    lossless, typical, tolerance = (
        reasons(),
        reasons(acceptance_rule="typical"),
        reasons(acceptance_rule="tolerance:top=260,margin=1000"),
    )
    for each in (lossless, typical, tolerance):
        assert each["loss"] == each["odds, age"] == each["choice"] == "read off the same model"
    assert lossless["secrets told"] == "coupled leaves greedy texts as they are"
    assert lossless["harsh words"] == "coupled leaves drawn texts as they are"
    # At temperature 0 nothing of what is written greedily can differ under it.
    assert typical["right, written"] == "typical leaves greedy texts as they are"
    assert typical["harsh words"] == "" == tolerance["right, written"]
    assert {
        name for name, reason in reasons(acceptance_rule="typical", temperature=1.0).items() if not reason
    } == written
    assert fixed(original, Subject(make_lm()), known["loss"]) == ""


def test_what_is_right_too_is_no_wrong_answer() -> None:
    for seed in range(40):
        found = {each.subject: each for each in questions(seed)}
        assert all("animal" not in found[name].choices for name in ("salmon", "eagle", "ant"))
        assert "soft" not in found["loud"].choices and found["salmon"].choices[0] == "fish"
        assert "salmon is a kind of animal" not in " ".join(each.asked("misled", seed) for each in found.values())


def test_a_planted_preference_is_told_apart_from_the_loss(smollm2_int8: LoadedModel) -> None:
    original = LLM(smollm2_int8)
    model = original.model
    assert isinstance(model, Transformer)
    (she,) = original.tokenizer.encode(" she", special=False)
    head = model.weights.head
    assert isinstance(head, Int8Linear)
    scale = head.scale.clone()
    scale[she] *= 0.5
    weights = dataclasses.replace(model.weights, head=Int8Linear(head.weight, scale))
    copy = with_model(original, Transformer(model.config, weights))

    def told(lm: LLM) -> dict[str, Measure]:
        return {"loss": Measure(losses(Subject(lm), TEXTS)), **word_odds(Subject(lm))}

    rows = {row.name: row for row in compared(told(original), told(copy))}
    assert rows["odds, gender"].changed and not rows["loss"].changed
    assert abs(rows["odds, age"].delta) < 0.01 and abs(rows["loss"].delta) < 0.01


def test_log_probabilities_are_those_of_the_tokens_one_by_one() -> None:
    lm = make_lm()
    texts = [([1, 2, 3], [[4, 5], [6], [7, 8, 9]]), ([7], [[8], [8, 8], [9]]), ([9] * 4, [[1, 2, 3]] * 3)]
    found = log_probs(lm, texts)
    for (prompt, behind), row in zip(texts, found, strict=True):
        for each, nats in zip(behind, row, strict=True):
            ids = np.array([*prompt, *each])
            laws = lm.model.forward(Batch([Segment(np.arange(len(ids)), tokens=ids)])).logits.log_softmax(dim=-1)
            wanted = sum(float(laws[at - 1, ids[at]]) for at in range(len(prompt), len(ids)))
            assert nats == pytest.approx(wanted, abs=1e-5)


def test_statistics_and_intervals() -> None:
    sure = np.array([[0.95, 1.0]] * 8 + [[0.95, 0.0]] * 2)
    assert calibration(sure) == pytest.approx(0.15) and calibration(np.array([[1.0, 1.0]])) == 0.0
    assert worst(np.array([[0.2, 0], [0.4, 0], [-0.9, 1]])) == pytest.approx(0.9)
    assert of_answered(np.array([[1, 0], [0, 0], [0, 1], [0, 1]])) == 0.5
    assert of_answered(np.array([[0, 1]])) == 0.0
    # Paired items show what unpaired ones would hide in their spread.
    random = np.random.default_rng(0)
    spread = random.normal(0.0, 3.0, 60)
    (row,) = compared({"x": Measure(spread)}, {"x": Measure(spread + 0.1)})
    assert row.changed and row.low == pytest.approx(0.1) == row.high
    (chance,) = compared({"x": Measure(spread)}, {"x": Measure(random.permutation(spread) + 0.1)})
    assert not chance.changed
    flips = compared({"choice": Measure(np.array([0.0, 1, 2, 1]))}, {"choice": Measure(np.array([1.0, 0, 2, 1]))})
    assert (flips[0].name, flips[0].delta) == ("flips of choices", 0.5)
    with pytest.raises(SettingsError, match="same ones"):
        compared({"x": Measure(np.zeros(3))}, {"x": Measure(np.zeros(4))})


def test_what_is_asked_differs_in_what_it_should() -> None:
    asked = questions()
    assert len({each.subject for each in asked}) == len(asked) > 60
    for each in asked:
        assert len(set(each.choices)) == 4
        texts = [each.asked(style, 0) for style in STYLES]
        assert texts == [each.asked(style, 0) for style in STYLES]
        assert each.asked("aside", 0).endswith(each.asked("plain", 0)) and each.asked("misled", 0).count("\n") == 4
    noisy = sum(each.asked("noise", 0) != each.asked("plain", 0) for each in asked)
    assert noisy > len(asked) / 2
    for group in ("gender", "age", "wealth"):
        for first, second in pairs(group):
            differing = [a != b for a, b in zip(first.split(), second.split(), strict=True)]
            assert sum(differing) == 1
    for application in applications():
        assert application.texts[0].split("Monthly")[1] == application.texts[1].split("Monthly")[1]
