"""Texts with labels of one's own: read as they are on a server, learned from, and thresholds that hold at any time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.constraints.regex import Regex
from decodery.core.errors import CorruptFile, SettingsError
from decodery.engine.monitoring import monitor_reports
from decodery.monitors.confidence import Confidence
from decodery.monitors.factcheckmate import FactCheckmate
from decodery.monitors.neurofeedback import Neurofeedback
from decodery.monitors.probe import Probe
from decodery.monitors.sae import SAE
from decodery.monitors.sequential import Sequential
from decodery.monitors.threshold import Threshold
from decodery.monitors.truthprint import TruthPrInt
from decodery.testing import to_int8
from decodery.training import direction, head_texts
from decodery.training.activations import read_answers
from decodery.training.labelled import LabelledChat, highest_scores, is_labelled, read_chats, reread
from decodery.training.monitor_threshold import calibrate, trained_part, with_threshold
from decodery.training.probe import train_probe
from decodery.training.ranking import parts
from decodery.training.sequential import Talk, hear, judged, read_talks
from methods import untrained_codes
from methods import untrained_probe as probe
from serving import tiny_lm

SITES = ("resid_post.1",)


def chat(user: str, answer: str | None, label: bool = False, group: str = "g") -> LabelledChat:
    said = [{"role": "user", "content": user}]
    said += [] if answer is None else [{"role": "assistant", "content": answer}]
    return LabelledChat(tuple(said), label, group)


def own_texts(count: int) -> list[LabelledChat]:
    """Answers of few letters, which are looked for where they hold an x."""
    draws, found = np.random.default_rng(0), []
    for number in range(count):
        text = "".join(draws.choice(list("abcd"), 6))
        found.append(chat(f"Say {number}", text + "x" * (number % 2), bool(number % 2), f"g{number // 2}"))
    return found


def monitors() -> dict[str, Any]:
    axis = Probe(probe("new").tensors, SITES[0], "answer", Threshold(9, 0.1, 0, ""))
    return {
        "confidence": Confidence("worst"),
        "truthprint": TruthPrInt(probe("new"), action="flag"),
        "factcheckmate": FactCheckmate(probe("prompt")),
        "sequential": Sequential(probe("prompt"), action="flag"),
        "neurofeedback": Neurofeedback(axis),
        "sae": SAE(untrained_codes(), 4),
    }


def test_a_given_text_has_the_scores_that_it_had_while_it_was_written() -> None:
    lm, watching = tiny_lm(), list(monitors().values())
    lm.model = to_int8(lm.model)
    for seed in range(3):
        prompt = [{"role": "user", "content": f"Question {seed}"}]
        settings = {"temperature": 1.0, "seed": seed, "max_new_tokens": 40}
        written = lm.chat(prompt, constraint=Regex("[a-z ]{3,30}"), monitor=watching, **settings)  # type: ignore[arg-type]
        assert written.finish_reason == "stop"
        (again,) = reread(lm, [chat(prompt[0]["content"], written.text)], watching)
        assert again.generated == written.tokens
        for there, here in zip(monitor_reports(again), written.monitors, strict=True):
            assert there.scores == here.scores and there.name == here.name


def test_a_conversation_has_the_highest_score_of_its_answers() -> None:
    lm, found = tiny_lm(), []
    lm.model = to_int8(lm.model)
    said = [("a", "xyz"), ("b", "uvw"), ("c", "klm")]
    messages = [m for u, a in said for m in ({"role": "user", "content": u}, {"role": "assistant", "content": a})]
    whole = LabelledChat(tuple(messages), False, "g")
    for end in (2, 4, 6):
        found += highest_scores(lm, [LabelledChat(tuple(messages[:end]), False, "g")], Confidence("worst"))
    assert highest_scores(lm, [whole], Confidence("worst"), unit="conversation") == [max(found)]
    assert len(set(found)) == 3
    # A last question without an answer is asked for, too.
    open_end = LabelledChat((*messages, {"role": "user", "content": "d"}), False, "g")
    assert len(open_end.beginnings()) == 4 and len(whole.beginnings()) == 3


def flagged_at_any_time(rule: str, rate: float, draws: np.random.Generator) -> float:
    """The share of new harmless texts, of 5 to 60 tokens, that a threshold flags somewhere."""
    texts = [np.cumsum(draws.normal(size=draws.integers(5, 60))) / 3 + draws.normal() for _ in range(80)]
    if rule == "token":
        limit = float(np.quantile(np.concatenate(texts[:40]), 1 - rate))
    elif rule == "end":
        limit = Threshold.calibrated([text[-1] for text in texts[:40]], rate, "").value
    else:
        limit = Threshold.calibrated([text.max() for text in texts[:40]], rate, "").value
    return float(np.mean([text.max() > limit for text in texts[40:]]))


def test_a_threshold_of_highest_scores_holds_at_any_time_and_one_of_tokens_does_not() -> None:
    draws, rate = np.random.default_rng(0), 0.1
    found = {rule: [flagged_at_any_time(rule, rate, draws) for _ in range(200)] for rule in ("text", "token", "end")}
    error = 3 * np.std(found["text"]) / np.sqrt(200)
    # The exact rate of 40 texts: 41 places, of which 37 are below.
    assert abs(np.mean(found["text"]) - 4 / 41) < error and np.mean(found["text"]) < rate + error
    assert np.mean(found["token"]) > 2 * rate and np.mean(found["end"]) > 1.3 * rate


def test_a_threshold_of_texts_does_not_hold_for_conversations_and_one_of_conversations_does() -> None:
    draws, rate, found = np.random.default_rng(1), 0.1, {"text": list[float](), "conversation": list[float]()}
    for _ in range(300):
        talks = draws.normal(size=(80, 6))
        for unit, scores in (("text", talks[:40, -1]), ("conversation", talks[:40].max(axis=1))):
            limit = Threshold.calibrated(scores, rate, "", unit=unit).value
            found[unit].append(float((talks[40:].max(axis=1) > limit).mean()))
    error = 3 * np.std(found["conversation"]) / np.sqrt(300)
    assert np.mean(found["conversation"]) < rate + error and np.mean(found["text"]) > 3 * rate


def test_a_monitor_is_calibrated_by_the_scores_that_it_has_in_use(tmp_path: Path) -> None:
    lm, texts = tiny_lm(), own_texts(40)
    threshold, report = calibrate(lm, texts, Confidence("worst"), 0.2, data="own")
    assert threshold.chat is True and threshold.tokens == 8 and threshold.unit == "text"
    assert list(report["baselines"]) == ["length", "mean log-probability", "bag of words"]
    marked = [replace(each, messages=(*each.messages[:-1], {"role": "assistant", "content": f"a {each.label}"}))
              for each in texts]  # fmt: skip
    _, told = calibrate(lm, marked, Confidence("worst"), 0.2)
    # The words are those of texts that nothing is tested on.
    assert told["baselines"]["bag of words"]["auroc"] == 1.0
    assert threshold.harmless == sum(not each.label for each in texts) - report["items"] // 2
    # The longest answer of a conversation may be an earlier one.
    talks = [replace(each, messages=(*chat("a", "b" * 12).messages, *each.messages)) for each in texts[:16]]
    for unit, longest in (("text", 8), ("conversation", 13)):
        assert calibrate(lm, talks, Confidence("worst"), 0.4, unit=unit)[0].tokens == longest
    again = replace(threshold, unit="conversation")
    assert Threshold.of(again.facts()) == again and Threshold.of({**threshold.facts(), "unit": "text"}) == threshold
    with pytest.raises(CorruptFile):
        Threshold.of(threshold.facts() | {"unit": "token"})
    for name, monitor in monitors().items():
        known = trained_part(monitor)
        assert (known is None) == (name == "confidence")
        if known is None:
            continue
        setting, part = known
        found, about = calibrate(lm, texts[:16], monitor, 0.4)
        with_threshold(part, found, about).save(tmp_path / name)
        loaded = replace(monitor, **{setting: str(tmp_path / name)})
        assert loaded.limit == found.value and loaded.trained.facts["calibration"] == about
    with pytest.raises(SettingsError, match="cannot be promised from 15 harmless texts"):
        calibrate(lm, texts, Confidence("worst"), 0.01)


def test_a_baseline_of_a_threshold_is_read_the_way_round_that_the_other_texts_say() -> None:
    # What is looked for is shorter than the rest.
    texts = [chat(f"Say {n}", "ab" if n % 2 else "abcdefgh", bool(n % 2), f"g{n // 2}") for n in range(60)]
    _, report = calibrate(tiny_lm(), texts, Confidence("worst"), 0.2)
    assert report["baselines"]["length"]["auroc"] == 1
    assert report["baselines"]["mean log-probability"]["auroc"] >= 0.5


def test_without_a_group_in_the_test_part_a_threshold_is_set_and_nothing_is_ranked() -> None:
    texts = [replace(each, group="one") for each in own_texts(40)]
    seed = next(seed for seed in range(99) if parts(["one"], seed)[0] != "test")
    threshold, report = calibrate(tiny_lm(), texts, Confidence("worst"), 0.2, seed=seed)
    assert threshold.harmless == 20 and report["items"] == 0 and report["auroc"] is None
    assert report["baselines"]["bag of words"]["items"] == 0


def test_every_kind_learns_from_the_same_texts(tmp_path: Path) -> None:
    lm, path = tiny_lm(), tmp_path / "texts.jsonl"
    texts = own_texts(8)
    lines = [{"messages": list(each.messages), "label": each.label, "group": each.group} for each in texts]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert is_labelled(path) and [replace(each, line=0) for each in read_chats(path, answers=True)] == texts
    answers = read_answers(lm, texts, SITES, 4)
    assert [each.wrong for each in answers] == [each.label for each in texts]
    (text,) = reread(lm, texts[:1], [TruthPrInt(probe("new")), FactCheckmate(probe("prompt"))])
    rows, prompt = monitor_reports(text)
    assert probe("new").score(answers[0].new[SITES[0]]).tolist() == pytest.approx(rows.scores, abs=1e-5)
    assert float(probe("prompt").score(answers[0].prompt[SITES[0]][None])) == pytest.approx(prompt.scores[-1], abs=1e-5)
    (axis,) = (each.states[SITES[0]] for each in direction.read_answers(lm, texts[:1], SITES))
    assert axis.tolist() == pytest.approx(answers[0].new[SITES[0]][1:].mean(dim=0).tolist(), abs=1e-6)
    heads = head_texts.read_answers(lm, texts[:2])
    assert heads[1].example.positive and heads[0].rows.shape[:2] == (len(answers[0].tokens), 8)
    talks = read_talks(path)
    assert talks == [Talk.labelled(each) for each in read_chats(path)]
    assert [each.completes for each in talks] == [0 if each.label else None for each in texts]


def test_of_a_labelled_conversation_only_the_whole_is_looked_for() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant", "user")]
    wanted, harmless = (Talk.labelled(LabelledChat(tuple(messages), label, "g")) for label in (True, False))
    assert wanted.messages() == messages and wanted.completes == 2 and harmless.completes is None
    lm = tiny_lm()
    assert [each.wrong for each in judged(hear(lm, [wanted], SITES))] == [True]
    assert [each.wrong for each in judged(hear(lm, [harmless], SITES))] == [False] * 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [], "label": true}', "line 1 of"),
        ('{"messages": [{"role": "user", "content": "a"}], "label": 1}', 'not {"messages"'),
        ('{"messages": [{"role": "robot", "content": "a"}], "label": true}', "with the roles system, user, assistant"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}], "label": true}', "line 1 of"),
        ('{"messages": [{"role": "user", "content": "a"}], "label": true, "lable": 1}', "line 1 of"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "label": true}', "has no message of the user's"),
        ('{"messages": [{"role": "user", "content": "a"}], "label": true}', "ends without an answer"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "label": true}',
            "ends without an answer",
        ),
    ],
)
def test_other_lines_are_refused_by_their_number(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(line)
    with pytest.raises(CorruptFile) as refused:
        read_chats(path, answers=True)
    assert said in str(refused.value) and "line 1" in str(refused.value)
    with pytest.raises(SettingsError, match="no chat template"):
        next(reread(tiny_lm(template=None), own_texts(1), [Confidence()]))


def test_it_is_said_where_texts_are_unlike_those_learned_from() -> None:
    lm = tiny_lm()
    answers = read_answers(lm, own_texts(160), SITES, 4)
    kinds: dict[str, Any] = {"new": TruthPrInt, "prompt": FactCheckmate}
    for rows, kind in kinds.items():
        learned = train_probe(answers, SITES, rows, inner=(4,), steps=20, rate=0.3)  # type: ignore[arg-type]
        about = learned.facts["inputs"]
        assert about["rate"] == 0.05 and about["texts"] >= 19
        fresh = own_texts(190)[160:]
        strange = [chat("\n\nWHY? " * 9, "QUIZ: 9 * 7 = 63!"), chat("Это другой язык.", "и ответ другой")]
        said = {}
        for name, texts in (("fresh", fresh), ("strange", strange)):
            reports = [monitor_reports(text)[0] for text in reread(lm, texts, [kind(learned, action="flag")])]
            said[name] = np.mean([each.unlike is not None for each in reports])
            assert all(("unlike_training" in each.to_dict()) == (each.unlike is not None) for each in reports)
        assert said["fresh"] < 0.2 and said["strange"] == 1
        # Without the limit of training nothing is said.
        silent = replace(learned, facts={})
        read = reread(lm, strange, [kind(silent, action="flag")])
        assert all(monitor_reports(text)[0].unlike is None for text in read)


def test_an_axis_says_once_where_a_text_is_unlike_its_statements() -> None:
    lm = tiny_lm()
    read = direction.read_answers(lm, own_texts(160), SITES)
    axis = direction.axis_by(read, "lr")
    inputs = axis.facts["inputs"]
    assert inputs["rate"] == 0.05 and inputs["texts"] >= 19 and 2 <= inputs["tokens"] < 16
    said = {}
    for name, texts in (("fresh", own_texts(190)[160:]), ("strange", [chat("\n\nWHY? " * 9, "QUIZ: 9 * 7 = 63!")])):
        reports = [monitor_reports(text)[0] for text in reread(lm, texts, [Neurofeedback(axis)])]
        said[name] = [each.unlike for each in reports]
    # The row of the first token is the prompt's.
    assert said["strange"] == [inputs["tokens"]]
    assert np.mean([each is not None for each in said["fresh"]]) < 0.2
    (silent,) = reread(lm, texts, [Neurofeedback(replace(axis, facts={}))])
    assert monitor_reports(silent)[0].unlike is None


def test_probes_are_plain_tensors_for_others(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 32, generator=draws) * 3 + 1
    made = probe("new")
    mean, scale = torch.randn(32, generator=draws), torch.rand(32, generator=draws) + 0.5
    scaled = replace(made, tensors={**made.tensors, "mean": mean, "scale": scale})
    for each in (made, scaled):
        again = Probe.from_tensors(each.to_tensors(), SITES[0])
        torch.testing.assert_close(again.score(rows), each.score(rows), rtol=1e-5, atol=1e-6)
        again.save(tmp_path / "probe.safetensors")
        assert TruthPrInt(str(tmp_path)).trained.score(rows).equal(again.score(rows))
    weight = torch.randn(32, generator=draws)
    linear = Probe.from_tensors({"weight": weight, "bias": torch.tensor(0.25)}, SITES[0])
    torch.testing.assert_close(linear.score(rows), (rows @ weight + 0.25).double().sigmoid(), rtol=1e-5, atol=1e-6)
    assert set(linear.to_tensors()) == {"weight", "bias"}
    for wrong in ({"weight": weight}, {"weight": torch.zeros(2, 32), "bias": torch.zeros(1)}, {"w": weight}):
        with pytest.raises(SettingsError, match="a probe has the tensors weight and bias"):
            Probe.from_tensors(wrong, SITES[0])
