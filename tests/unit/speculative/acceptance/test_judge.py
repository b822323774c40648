"""Judge Decoding: the rule between its two ends, the head as a file, and its training from both kinds of questions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, ModelNotFound, PromptError, SettingsError
from decodery.sampling import Sampler
from decodery.speculative.acceptance.judge import Head, Judge, normalized
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing import Garbage, check_identical, decode, tiny_transformer
from decodery.training.judge import JUDGE, fit
from decodery.training.mining import Examples, Mining, from_answers, last_number, mined, read_questions
from decodery.training.ranking import auc

TARGET, PROMPTS = tiny_transformer(0), [[1, 2, 3], [5] * 6 + [7, 8, 9]]
DRAFTER = DraftModel(tiny_transformer(3), length=4)
HEAD = Head(torch.linspace(-1, 1, 32), 0.0, layer=2)
PLAIN = Sampler.from_settings(temperature=1.0)


@pytest.mark.parametrize("sampler", [None, PLAIN], ids=["greedy", "sampled"])
def test_a_threshold_of_one_is_the_coupled_rule(sampler: Sampler | None) -> None:
    sure = Head(torch.zeros(32), 1e6, layer=2)
    for head in (HEAD, sure):
        for drafter in (DRAFTER, Garbage()):
            settings = {"sampler": sampler, "seeds": (1,), "max_new_tokens": 20}
            check_identical(TARGET, PROMPTS, drafter=drafter, acceptance_rule=Judge(head, threshold=1.0), **settings)


def test_a_threshold_of_zero_accepts_every_draft() -> None:
    hopeless = Head(torch.zeros(32), -1e6, layer=2)
    (run,) = decode(
        TARGET, PROMPTS[:1], drafter=DRAFTER, acceptance_rule=Judge(hopeless, threshold=0.0), max_new_tokens=21
    )
    assert [step.emitted for step in run.trace.decoding] == [5] * 4
    with pytest.raises(AssertionError, match="departs from plain decoding"):
        check_identical(TARGET, PROMPTS, drafter=DRAFTER, acceptance_rule=Judge(hopeless, threshold=0.0))


def test_the_head_reads_the_state_of_the_drafted_token_itself() -> None:
    # A head that likes one token's embedding alone (layer 0) accepts that token and no other.
    liked = 7
    states = normalized(TARGET.embed_tokens(torch.arange(64)))
    weight = torch.linalg.lstsq(states.double(), torch.nn.functional.one_hot(torch.tensor(liked), 64).double()).solution
    scores = states.double() @ weight
    assert scores.argmax() == liked
    others = torch.cat([scores[:liked], scores[liked + 1 :]]).max()
    head = Head(weight.float(), -float(scores[liked] + others) / 2, layer=0)
    plain, judged = (
        decode(TARGET, PROMPTS[:1], drafter=Garbage(nodes=40), acceptance_rule=rule, max_new_tokens=60, seeds=(3,))[0]
        for rule in (Judge(head, threshold=1.0), Judge(head))
    )
    assert judged.generated.count(liked) > plain.generated.count(liked)
    accepted = sum(step.accepted for step in judged.trace.decoding)
    assert 0 < accepted <= judged.generated.count(liked) + sum(step.accepted for step in plain.trace.decoding)


def test_a_head_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    Head(torch.arange(32.0), 0.5, 2, {"auc": 0.9}).save(path)
    rule = Judge(str(path))
    assert rule.requirements.taps == (2,) and rule.trained.facts == {"auc": 0.9}
    assert torch.equal(rule.trained.weight, torch.arange(32.0))
    with pytest.raises(ModelNotFound, match="there is no judge at"):
        Judge(str(tmp_path / "none"))
    (tmp_path / "bad").write_bytes(b"not tensors")
    with pytest.raises(CorruptFile, match="holds no judge"):
        Judge(str(tmp_path / "bad"))
    with pytest.raises(SettingsError, match="between 0 and 1"):
        Judge(HEAD, threshold=1.5)


def test_a_head_of_another_model_is_refused() -> None:
    for head, message in ((Head(torch.zeros(31), 0.0, 2), "of 31 numbers"), (Head(torch.zeros(32), 0.0, 9), "layer 9")):
        with pytest.raises(SettingsError, match=message):
            decode(TARGET, PROMPTS[:1], drafter=DRAFTER, acceptance_rule=Judge(head), max_new_tokens=8)


def test_answers_are_labelled_up_to_the_mistake() -> None:
    prompt, right, wrong = [1, 2], [3, 4, 5], [3, 9, 8, 7]
    states, plain, valid = from_answers(TARGET, prompt, right, wrong)
    assert valid.tolist() == [True, True, True, False]
    # The states are those of plain reading.
    from decodery.models.batch import Batch, Segment

    for row, text in enumerate(([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 9])):
        rows = Segment.chunk(text, TARGET.new_cache(), logit_rows=list(range(len(text))))
        scores = TARGET.forward(Batch([rows]), taps=(2,))
        assert np.abs(normalized(scores.hidden[2])[-1].numpy() - states[row]).max() < 1e-6
        likely = scores.logits.log_softmax(dim=-1)[range(1, len(text) - 1), text[2:]]
        wanted = [len(text) - 2, float(likely[-1]), float(likely.mean())]
        assert plain[row] == pytest.approx(wanted, abs=1e-4)


def test_alternatives_are_labelled_by_what_becomes_of_the_answer() -> None:
    # "The result" of these texts is whether some token comes up; one that never does is never spoilt.
    mining = Mining(max_new_tokens=12, places=5, alternatives=2)
    (plain,) = decode(TARGET, [[1, 2, 3]], max_new_tokens=12)
    states, numbers, valid = mined(TARGET, [1, 2, 3], lambda tokens: "always the same", mining)
    assert states.shape == (10, 32) and numbers.shape == (10, 3) and valid.all()
    *_, valid = mined(TARGET, [1, 2, 3], lambda tokens: str(list(tokens[:12]) == plain.generated), mining)
    assert not valid.any()
    assert len(mined(TARGET, [1, 2, 3], lambda tokens: None, mining)[2]) == 0


@pytest.mark.integration
def test_training_separates_goes_on_and_reports(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    states = normalized(torch.from_numpy(random.standard_normal((1200, 32)))).numpy()
    valid = states[:, 3] - states[:, 5] > 0.8
    # The mean log-probability falls with what is valid, so that the other sense of it is read.
    plain = np.stack([random.random(1200), random.random(1200), random.random(1200) - valid], axis=1)
    found = Examples(states, valid, np.arange(1200) // 4, plain)
    head, history = fit(found, 2, tmp_path / "a", steps=200)
    assert head.facts["auroc"] > 0.97 and history.step == 200
    baselines = {name: each["auroc"] for name, each in head.facts["baselines"].items()}
    assert baselines.pop("mean log-probability") > 0.97 and max(baselines.values()) < 0.65
    assert head.facts["kept_at_threshold_90"] > 0.8
    assert head.facts["shuffled labels"]["auroc"] < 0.75
    agreed = (head.logits(torch.from_numpy(states)) > 0).numpy() == valid
    assert agreed.mean() > 0.9
    again, _ = fit(found, 2, tmp_path / "a", steps=200)
    assert torch.equal(again.weight, head.weight)
    shuffled = Examples(states, random.permutation(valid), found.question, plain)
    assert fit(shuffled, 2, tmp_path / "b", steps=50)[0].facts["auroc"] < 0.75
    assert (tmp_path / "a" / JUDGE).is_file()
    with pytest.raises(PromptError, match="of both kinds"):
        fit(Examples(states, np.ones(1200, dtype=bool), found.question, plain), 2, tmp_path / "c")


def test_auc_counts_pairs() -> None:
    assert auc(np.array([3.0, 1.0, 2.0, 2.0]), np.array([True, False, True, False])) == pytest.approx(3.5 / 4)
    assert auc(np.array([2.0, 1.0]), np.array([0.75, 0.25])) == 0.75
    assert auc(np.array([2.0, 1.0]), np.array([True, True])) == 0.5


def test_questions_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    good = [{"prompt": f"{n} + 1?"} for n in range(4)] + [{"prompt": "2 + 2?", "right": "4", "wrong": "5"}]
    path.write_text("\n".join(json.dumps(each) for each in good) + "\n\n", "utf-8")
    assert read_questions(path)[4].wrong == "5"
    for bad, message in (("[]", "line 6"), ('{"prompt": "a", "right": "b"}', "both"), ('{"prompt": 3}', "texts")):
        path.write_text("\n".join(json.dumps(each) for each in good) + "\n" + bad, "utf-8")
        with pytest.raises(CorruptFile, match=message):
            read_questions(path)
    path.write_text("{}", "utf-8")
    with pytest.raises(CorruptFile, match="line 1"):
        read_questions(path)


def test_the_last_number_is_the_result() -> None:
    assert last_number("17 and 25 make 1,042.5 in all.") == "1042.5"
    assert last_number("so it is -3.") == "-3"
    assert last_number("none") is None
