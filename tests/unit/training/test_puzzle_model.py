"""Training puzzle models: what they learn from, where they stop, and that a pause changes nothing."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.training.loop import CHECKPOINT, TrainingPlan, train
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import drawn, puzzle
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded
from decodery_benchmarks.training import puzzle_model
from decodery_benchmarks.training.puzzle_model import (
    PuzzleRecipe,
    TransformerShape,
    predicted,
    random_transformer,
    train_puzzle_model,
    training_batch,
)

SMALL = TransformerShape(32, 2, 2, 48, 64)
CHAIN = puzzle("chain:operations=2")


def test_texts_side_by_side_are_read_as_each_alone_and_solutions_alone_are_learned() -> None:
    model = random_transformer(SMALL, 3)
    tokens, taught = training_batch(CHAIN, 5, 7, 0)
    again, others = training_batch(CHAIN, 5, 7, 0), training_batch(CHAIN, 5, 8, 0)
    assert torch.equal(tokens, again[0]) and tokens.tolist() != others[0].tolist()
    logits = predicted(model, tokens)
    prompts, random = islice(drawn(CHAIN, "train", 7), 5), Random("lesson 0 7")
    for prompt, row, learned, found in zip(prompts, tokens, taught, logits, strict=True):
        whole = [*encoded(prompt + CHAIN.solve(prompt, random)), END_ID]
        assert row.tolist()[: len(whole)] == whole
        assert learned.tolist() == [-1] * len(prompt) + whole[len(prompt) :] + [-1] * (len(row) - len(whole))
        alone = model.forward(Batch([Segment.chunk(whole, model.new_cache())])).logits
        assert (alone - found[: len(whole)]).abs().max() < 1e-4


@pytest.mark.integration
def test_a_run_ends_where_it_has_enough_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def run(out: Path, until: float, stop: int | None = None) -> tuple[list[float], int]:
        weight = {"weight": torch.full((3,), 4.0, requires_grad=True)}

        def loss(step: int) -> torch.Tensor:
            if step == stop:
                raise KeyboardInterrupt
            return (weight["weight"] ** 2).sum()

        plan = TrainingPlan(40, lr=0.1, validate_every=5, save_seconds=0.0)
        history = train(
            weight,
            loss,
            plan,
            out,
            validate=lambda: {"size": float(weight["weight"].detach().abs().sum())},
            metric="size",
            enough=lambda values: values["size"] < until,
        )
        return weight["weight"].tolist(), history.step

    whole = run(tmp_path / "whole", 10.0)
    assert 0 < whole[1] < 40 == run(tmp_path / "never", 0.0)[1]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "paused", 10.0, stop=whole[1] - 3)
    assert run(tmp_path / "paused", 10.0) == whole
    # It has ended, and a further call trains nothing.
    assert run(tmp_path / "paused", 10.0, stop=whole[1]) == whole


def test_a_model_is_made_by_one_call_and_solves_what_it_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(puzzle_model.SHAPES, "small", SMALL)
    recipe = PuzzleRecipe("small", steps=4, batch=3, every=2, greedy=3, sampled=1)
    found = train_puzzle_model(CHAIN, tmp_path / "made", recipe=recipe, command="decodery train ...")
    lm = dc.load(tmp_path / "made")
    prompts = list(islice(drawn(CHAIN, "validation"), 3))
    outputs = lm.generate(prompts, temperature=0.0, max_new_tokens=CHAIN.length + 8, drafter=None)
    solved = [CHAIN.verify(prompt, out.text) for prompt, out in zip(prompts, outputs, strict=True)]
    assert found["greedy"] == sum(solved) / 3
    card = (tmp_path / "made" / "README.md").read_text()
    assert "decodery train ..." in card and f"greedy {found['greedy']:.1%}" in card
    assert (tmp_path / "made" / "training" / CHECKPOINT).is_file()
    with pytest.raises(SettingsError, match="other settings"):
        train_puzzle_model(puzzle("chain:operations=3"), tmp_path / "made", recipe=recipe)
    with pytest.raises(SettingsError, match="no shape"):
        PuzzleRecipe("huge")


@pytest.mark.parametrize(("name", "spec"), [("tiny-1M-chain", "chain"), ("tiny-1M-countdown", "countdown:numbers=3")])
def test_the_models_that_come_along_solve_some_puzzles_and_fail_at_others(name: str, spec: str) -> None:
    lm, asked = solvers.load(name), puzzle(spec)
    prompts = list(islice(drawn(asked, "test"), 12))
    outputs = lm.generate(prompts, temperature=0.0, max_new_tokens=asked.length, drafter=None)
    solved = [asked.verify(prompt, out.text) for prompt, out in zip(prompts, outputs, strict=True)]
    assert 2 <= sum(solved) <= 10, [(prompt, out.text) for prompt, out in zip(prompts, outputs, strict=True)]
