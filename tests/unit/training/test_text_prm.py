"""Training a process reward model on judged texts: where steps end, and what the head makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.scorers.process_reward import ProcessReward
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from decodery.training import value
from decodery.training.evaluation import doubts
from decodery.training.kind import Run
from decodery.training.reward_head import StepExamples
from decodery.training.text_prm import JudgedText, TextPRMRecipe, step_ends, train_text_prm
from decodery_benchmarks.puzzles.alphabet import encoded, tokenizer
from decodery_benchmarks.training.prm import PRM
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer

MODEL = random_transformer(TransformerShape(32, 2, 2, 48, 64), 3)
RECIPE = TextPRMRecipe(delimiter=";", steps=80)


def run(out: Path, recipe: TextPRMRecipe = RECIPE) -> Run:
    return Run(LLM(LoadedModel(MODEL, tokenizer(), None, "tiny", "float32")), out, (recipe,))


def judged(prompts: int, right: str = "good;", wrong: str = "bad;") -> list[JudgedText]:
    """Two texts of each prompt, alike but for their second step, which says how they are to be judged."""
    random, found = Random(0), []
    for number in range(prompts):
        for step, reward in ((right, 1.0), (wrong, 0.0)):
            text = f"{random.randrange(10)};{step}{random.randrange(10)}"
            found.append(JudgedText(encoded(f"{number}="), encoded(text), reward))
    return found


def test_steps_end_as_searches_end_them() -> None:
    assert step_ends(tokenizer(), encoded("ab;;c;d"), ";") == [2, 5, 6]
    # What has nothing before its delimiter is no step.
    assert step_ends(tokenizer(), encoded(";;a;"), ";") == [3]
    assert step_ends(tokenizer(), encoded("ab|.c"), "|.") == [3, 4]
    assert step_ends(tokenizer(), [], ";") == []


def test_a_head_learns_from_judged_texts_which_beginnings_promise(tmp_path: Path) -> None:
    head = train_text_prm(run(tmp_path), judged(20))
    assert head.facts is not None
    # The first of three steps tells nothing: 2/3 of all pairs can be told apart, and half of the others by chance.
    assert head.facts["auc"] > 0.7 and head.facts["cross_entropy"] < head.facts["cross_entropy_of_the_mean"] - 0.1
    report = head.facts["validation"]
    assert report["tested on"] == "1 prompts that chose nothing" and report["items"] == 6
    assert set(report["baselines"]) == {"length", "mean log-probability", "always the mean"}
    # Steps end at 1, 6 and 7 of the right text and at 1, 5 and 6 of the wrong one: 3 of 9 pairs, ties half, and the
    # other way round where longer beginnings are right in what was learned from.
    assert report["baselines"]["length"]["auroc"] == 0.6667 and "auroc" in report["shuffled labels"]
    assert report["baselines"]["always the mean"]["auroc"] == 0.5 and report["groups"] == 1
    assert report["cross_entropy"] < report["baselines"]["always the mean"]["cross_entropy"]
    scorer = ProcessReward(str(tmp_path / PRM))
    outputs = [encoded(text) for text in ("5;", "5;good;", "5;bad;")]
    found = run_sync(judge(scorer, Candidates(encoded("7="), outputs, [False] * 3, model=MODEL))).tolist()
    assert found[2] + 0.2 < found[1]
    # Where both are judged alike there is nothing to be learned, and it shows.
    other = train_text_prm(run(tmp_path / "other"), judged(40, "good;", "good;"))
    assert other.facts is not None and other.facts["auc"] < 0.7
    # It goes on from what is there, and refuses what belongs to other texts.
    again = train_text_prm(run(tmp_path), judged(20))
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in head.tensors.items())
    corrected = [replace(judged(20)[0], reward=0.5), *judged(20)[1:]]
    for other_texts in (judged(24), corrected):
        with pytest.raises(SettingsError, match="other settings or other data"):
            train_text_prm(run(tmp_path), other_texts)


def test_ends_of_steps_have_the_mean_log_probability_of_the_text_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, prompt, text = LLM(LoadedModel(MODEL, tokenizer(), None, "tiny", "float32")), encoded("3="), encoded("1;good;4")
    # Parts of a text are read one after another.
    monkeypatch.setattr(value, "_CHUNK", 3)
    cache, found, steps = MODEL.new_cache(), list[float](), StepExamples()
    value.read_on(MODEL, cache, prompt[:-1], 2)
    states = value.read_on(MODEL, cache, [*prompt[-1:], *text], 2, found)
    ends = step_ends(tokenizer(), text, ";")
    steps.add(states[1:][ends], [1.0] * 3, ends, found, "3")
    assert steps.doubts == pytest.approx(doubts(lm, [(prompt, text[: end + 1]) for end in ends]), abs=1e-4)


def test_of_the_laws_of_a_text_only_its_own_tokens_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, moved, found = encoded("3=1;good;4"), list[int](), list[float]()
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (moved.append(self.numel()), cpu(self))[1])
    states = value.read_on(MODEL, MODEL.new_cache(), prompt, 2, found)
    assert len(found) == len(prompt) - 1 and max(moved) == states.numel()


def test_texts_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    right = [replace(each, reward=1.0) for each in judged(20)]
    for texts, message in ((right, "one reward"), ([replace(right[0], reward=2.0)], "from 0 to 1")):
        with pytest.raises(SettingsError, match=message):
            train_text_prm(run(tmp_path), texts)
    with pytest.raises(SettingsError, match="between 0 and 2"):
        train_text_prm(run(tmp_path, replace(RECIPE, tap=3)), judged(2))
