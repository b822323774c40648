"""Training process reward models: how steps are labelled, what a head reads off them, and how it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.trained.artifact import Artifact
from decodery.scorers.process_reward import ProcessHead, ProcessReward
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from decodery.training.value import states_of
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.puzzles.alphabet import encoded, tokenizer
from decodery_benchmarks.puzzles.scripted import ScriptedChain
from decodery_benchmarks.training import prm
from decodery_benchmarks.training.prm import LABELS, PRM, PRMRecipe, annotated, labelled, train_prm
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer
from decodery_benchmarks.training.solving import solved

CHAIN = puzzle("chain:operations=2")
PROMPT, RIGHT, WRONG = "7+3*2%10=", "7+3=0;0*2=0;#0", "7+3=0;0*2=1;#1"


def test_rollouts_label_a_beginning_by_how_often_it_ends_rightly(tmp_path: Path) -> None:
    double = ScriptedChain(0.4, 2)
    recipe = PRMRecipe(problems=10, solutions=2, rollouts=8)
    found = labelled(double, CHAIN, tmp_path, recipe)
    after_one = []
    for example in found:
        steps = CHAIN.steps(example.text)
        right = [CHAIN.open(example.prompt, "".join(steps[: place + 1])) for place in range(len(steps))]
        assert len(example.labels) == len(steps) == 3
        assert example.labels[-1] == CHAIN.verify(example.prompt, example.text)
        # Nothing mends an error; after two right steps the end is certain.
        assert all(label == 0 for label, open_ in zip(example.labels, right, strict=True) if not open_)
        assert not right[1] or example.labels[1] == 1
        after_one += [example.labels[0]] if right[0] else []
    mean = sum(after_one) / len(after_one)
    # One step is left, which is right with probability 0.6; with 0.36 if both were.
    assert abs(mean - 0.6) < 0.2 < abs(mean - 0.36)
    assert len(labelled(double, CHAIN, tmp_path, recipe)) == len(found)
    before = (tmp_path / LABELS).read_text()
    more = labelled(double, CHAIN, tmp_path, replace(recipe, problems=11))
    assert more[: len(found)] == found and (tmp_path / LABELS).read_text().startswith(before)
    with pytest.raises(SettingsError, match="other settings"):
        labelled(double, CHAIN, tmp_path, replace(recipe, rollouts=4))


def test_an_annotator_sees_the_reference_passes_over_steps_and_never_over_the_outcome() -> None:
    recipe, random = PRMRecipe(labels="reference"), Random(0)
    assert annotated(CHAIN, PROMPT, RIGHT, recipe, random) == (1, 1, 1)
    assert annotated(CHAIN, PROMPT, WRONG, recipe, random) == (1, 0, 0)
    assert annotated(CHAIN, PROMPT, RIGHT, replace(recipe, missed=1.0), random) == (0, 0, 1)
    assert annotated(CHAIN, PROMPT, WRONG, replace(recipe, flipped=1.0), random) == (0, 1, 0)
    shares = [annotated(CHAIN, PROMPT, RIGHT, replace(recipe, flipped=0.3), random)[0] for _ in range(400)]
    assert abs(sum(shares) / 400 - 0.7) < 0.1
    with pytest.raises(SettingsError, match="labels=reference"):
        PRMRecipe(missed=0.1)
    with pytest.raises(SettingsError, match="no steps"):
        train_prm(ScriptedChain(0.1, 2), puzzle("dyck"), Path("nowhere"))


@pytest.mark.integration
def test_a_head_learns_what_states_tell_and_scores_any_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_transformer(TransformerShape(32, 2, 2, 48, 64), 3)
    double = ScriptedChain(0.4, 2)
    # The states are a random model's, and the texts those of one that solves some.
    monkeypatch.setattr(prm, "solved", lambda own, *args, **kwargs: solved(double, *args, **kwargs))
    recipe = PRMRecipe(problems=40, solutions=2, labels="reference", steps=60)
    head = train_prm(model, CHAIN, tmp_path, recipe=recipe, command="python benchmarks/train.py prm")
    assert head.facts is not None and 0 <= head.facts["auc"] <= 1
    assert head.facts["cross_entropy"] < head.facts["cross_entropy_of_the_mean"]
    scorer = ProcessReward(str(tmp_path / PRM))
    outputs = [encoded(RIGHT[:at]) for at in (1, 6, len(RIGHT))]
    for finished in (False, True):
        candidates = Candidates(encoded(PROMPT), outputs, [finished] * 3, decode=tokenizer().decode, model=model)
        found = run_sync(judge(scorer, candidates))
        # One pass over a whole text has the states of all its beginnings.
        states = states_of(model, encoded(PROMPT), encoded(RIGHT), 2).float()[[0, 5, len(RIGHT) - 1]]
        assert found.tolist() == pytest.approx(torch.sigmoid(head.logits(states)).tolist(), abs=1e-5)
    with pytest.raises(SettingsError, match="trained for another model"):
        scorer.fits(random_transformer(TransformerShape(32, 2, 2, 48, 64), 4))
    with pytest.raises(SettingsError, match="reads 32 numbers"):
        scorer.fits(random_transformer(TransformerShape(64, 2, 2, 48, 64), 3))
    Artifact("process reward head", {"inner.weight": torch.zeros(2, 3)}, {"tap": 1}).save(tmp_path / "other")
    with pytest.raises(CorruptFile, match="holds no process reward head, or is damaged"):
        ProcessHead.load(tmp_path / "other")
