"""ORPO: its loss against its definition, its pairs against a tree, and a model that learns what scored more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.trace import Grown
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.load import load
from decodery.models.loaders.store import silent
from decodery.sampling.sampler import Sampler
from decodery.scorers import TextScore
from decodery.search import MCTS, BestOfN
from decodery.search.mcts import Visited
from decodery.training.cut import quantized
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.puzzles.alphabet import END_ID, tokenizer
from decodery_benchmarks.training import orpo as module
from decodery_benchmarks.training.orpo import ORPORecipe, PreferencePair, backed_up, orpo, pairs, train_orpo
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer

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
    assert [(each.begin, each.better, each.worse) for each in found] == [([0], [1], [3]), ([0, 2, 5, 6], [9], [8])]
    assert len(pairs([0], grown, margin=0.01)) == 3 and not pairs([0], grown, margin=0.95)


def test_pairs_go_by_what_was_found_behind_a_step_and_not_by_its_own_score() -> None:
    grown = [
        *(Grown(-1, [1], 0.6), Grown(-1, [2], 0.5), Grown(-1, [3], 0.55)),
        *(Grown(0, [4], 0.1), Grown(1, [5], 0.9), Grown(4, [6], 0.7)),
    ]
    found = backed_up(grown, (0, 1, 3, 4, 5), lambda scores: scores[-1])
    assert [(found[at].walks, round(found[at].value, 6)) for at in range(6)] == [
        (2, 0.35), (3, 0.7), (0, 0.55), (1, 0.1), (2, 0.8), (1, 0.7)
    ]  # fmt: skip
    (pair,) = pairs([0], grown, margin=0.1, hooks=(0, 1, 3, 4, 5))
    assert (pair.begin, pair.better, pair.worse) == ([0], [2], [1])
    # A search without walks says by the ends of its texts what a step was worth.
    (pair,) = pairs([0], grown, margin=0.1)
    assert (pair.better, pair.worse) == ([2], [1])
    # A step that no walk came to is not preferred, and may be the worse one.
    lone = [Grown(-1, [1], 0.4), Grown(-1, [2], 0.9), Grown(-1, [3], 0.1)]
    (pair,) = pairs([], lone, margin=0.1, hooks=(0,))
    assert (pair.better, pair.worse) == ([1], [3])
    # What a text is worth is as the search has it.
    deep = [Grown(-1, [1], 0.2), Grown(0, [2], 1.0), Grown(-1, [3], 0.5)]
    assert pairs([], deep, margin=0.1)[0].better == [1]
    assert pairs([], deep, margin=0.1, worth=min)[0].better == [3]


def test_walks_and_means_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Visited] = []
    made = MCTS._expand
    monkeypatch.setattr(MCTS, "_expand", lambda self, growth, leaf: (kept.append(leaf), made(self, growth, leaf))[1])
    model = quantized(random_transformer(TransformerShape(16, 1, 2, 16, 64), 0))
    search = replace(SEARCH, n=3, simulations=6, rounds=4, moves="never").bind(tokenizer())
    request = Request([1, 11, 2, 15], 8, sampler=Sampler.from_settings(temperature=1.0), eos_ids=(END_ID,), seed=3)
    trace = search.run(Engine(model, detokenizer=tokenizer().stream), request)[0].trace
    found = backed_up(trace.grown, trace.visits, lambda scores: scores[-1])
    children = [child for leaf in kept for child in leaf.children]
    assert sum(child.visits > 0 for child in children) > 3
    for child in children:
        known = found[child.node.number]
        assert known.walks == child.visits and known.value == pytest.approx(child.mean)


def test_a_round_makes_what_scored_more_likelier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model = puzzle("chain:operations=1"), quantized(random_transformer(TransformerShape(16, 1, 2, 16, 64), 0))
    recipe = ORPORecipe(problems=3, steps=40, lr=1e-2)
    found = module._searched(model, asked, SEARCH, tmp_path / "searched", recipe, silent)
    # One is better that ends in a digit.
    ends = [[[id for id in step if id != END_ID][-1] for step in (each.better, each.worse)] for each in found]
    assert found and all(better < 10 <= worse for better, worse in ends)
    monkeypatch.setattr(module, "drawn", None)
    assert module._searched(model, asked, SEARCH, tmp_path / "searched", recipe, silent) == found
    with pytest.raises(SettingsError, match="orpo learns from searches over steps"):
        module._searched(model, asked, BestOfN(LAST), tmp_path / "other", recipe, silent)
    with pytest.raises(SettingsError, match="search more problems"):
        train_orpo(model, asked, SEARCH, tmp_path / "searched", recipe=recipe)
    many = [PreferencePair([1, 11, 2, 15], [number % 3], [20 + number % 7]) for number in range(40)]
    monkeypatch.setattr(module, "_searched", lambda *given: many)
    values = train_orpo(model, asked, SEARCH, tmp_path / "learned", recipe=recipe)
    assert values["loss"] < values["loss_before"] - 1 and values["preferred"] == 1
    assert train_orpo(model, asked, SEARCH, tmp_path / "learned", recipe=recipe) == values
    assert load(str(tmp_path / "learned")).model.config.hidden_size == 16
