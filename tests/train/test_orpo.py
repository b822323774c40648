"""ORPO: its loss against its definition, its pairs against a tree, and a model that learns what scored more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decodery.core.trace import Grown
from decodery.errors import SettingsError
from decodery.model.load import load
from decodery.model.store import silent
from decodery.puzzles import puzzle
from decodery.puzzles.alphabet import END_ID
from decodery.score import TextScore
from decodery.search import MCTS
from decodery.train import orpo as module
from decodery.train.cut import quantized
from decodery.train.orpo import ORPORecipe, Pair, orpo, pairs, train_orpo
from decodery.train.puzzle_model import Shape, random_transformer

LAST = TextScore(lambda text: float(text[-1:] in "0123456789"), lambda text: float(text[-1:] in "0123456789"))
SEARCH = MCTS(LAST, delimiter=None, step_tokens=1, n=12, simulations=1, rounds=2)


def test_the_loss_is_that_of_the_paper_and_without_odds_that_of_learning_the_better() -> None:
    better, worse = torch.tensor([-0.3, -2.0], dtype=torch.float64), torch.tensor([-0.7, -0.1], dtype=torch.float64)
    odds = [p / (1 - p) for p in (better.exp(), worse.exp())]
    ratio = odds[0] / odds[1]
    assert torch.allclose(orpo(better, worse, 0.2), -better + 0.2 * torch.log1p(1 / ratio))
    assert torch.equal(orpo(better, worse, 0.0), -better)
    better.requires_grad_(True), worse.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda a, b: orpo(a, b, 0.2), (better, worse))
    # What is sure has finite odds.
    assert orpo(torch.zeros(1), torch.zeros(1), 1.0).isfinite().all()


def test_pairs_are_the_best_and_the_worst_behind_one_text() -> None:
    grown = [
        *(Grown(-1, [1], 0.5), Grown(-1, [2], 0.9), Grown(-1, [3], 0.1), Grown(-1, [4], None)),
        *(Grown(1, [5, 6], 0.4), Grown(1, [7], 0.45), Grown(4, [8], 0.2), Grown(4, [9], 0.8)),
    ]
    found = pairs([0], grown, margin=0.1)
    assert [(each.begin, each.better, each.worse) for each in found] == [([0], [2], [3]), ([0, 2, 5, 6], [9], [8])]
    assert len(pairs([0], grown, margin=0.01)) == 3 and not pairs([0], grown, margin=0.95)


def test_a_round_makes_what_scored_more_likelier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model = puzzle("chain:operations=1"), quantized(random_transformer(Shape(16, 1, 2, 16, 64), 0))
    recipe = ORPORecipe(problems=3, steps=40, lr=1e-2)
    found = module._searched(model, asked, SEARCH, tmp_path / "searched", recipe, silent)
    # One is better that ends in a digit.
    ends = [[[id for id in step if id != END_ID][-1] for step in (each.better, each.worse)] for each in found]
    assert found and all(better < 10 <= worse for better, worse in ends)
    monkeypatch.setattr(module, "drawn", None)
    assert module._searched(model, asked, SEARCH, tmp_path / "searched", recipe, silent) == found
    with pytest.raises(SettingsError, match="search more problems"):
        train_orpo(model, asked, SEARCH, tmp_path / "searched", recipe=recipe)
    many = [Pair([1, 11, 2, 15], [number % 3], [20 + number % 7]) for number in range(40)]
    monkeypatch.setattr(module, "_searched", lambda *given: many)
    values = train_orpo(model, asked, SEARCH, tmp_path / "learned", recipe=recipe)
    assert values["loss"] < values["loss_before"] - 1 and values["preferred"] == 1
    assert train_orpo(model, asked, SEARCH, tmp_path / "learned", recipe=recipe) == values
    assert load(str(tmp_path / "learned")).model.config.hidden_size == 16
