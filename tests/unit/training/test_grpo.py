"""GRPO on calibrated rewards: its gradient against the objective's own, its win rates, and a model that learns."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.models.loaders.load import load
from decodery.scorers import TextScore
from decodery.training.cut import quantized
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.training.grpo import GRPORecipe, surrogate, train_grpo, win_rate
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer

BETA = 0.3


def _mean_gradient(weights: torch.Tensor, base: torch.Tensor, worth: torch.Tensor, own: bool = False) -> torch.Tensor:
    """Of the surrogate over all groups of three texts, by their probability. own: the text itself in its baseline."""
    law, total = weights.detach().log_softmax(0).exp(), torch.zeros_like(weights)
    for group in product(range(len(weights)), repeat=3):
        chosen = list(group)
        logs, known, values = weights.log_softmax(0)[chosen], base[chosen], worth[chosen]
        loss = surrogate(logs[None], known[None], values[None], BETA)[0]
        if own:
            gained = values - BETA * (logs.detach() - known)
            loss = -((gained - gained.mean()) * logs).mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        total += float(law[chosen].prod()) * gradient
    return total


def test_the_gradient_is_that_of_worth_less_distance_from_the_untrained_model() -> None:
    weights = torch.tensor([0.4, -0.2, 0.1, 1.0], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64).log()
    worth = torch.tensor([0.9, 0.1, 0.5, 0.2], dtype=torch.float64)
    logs = weights.log_softmax(0)
    (exact,) = torch.autograd.grad((logs.exp() * (BETA * (logs - base) - worth)).sum(), weights)
    assert torch.allclose(_mean_gradient(weights, base, worth), exact, atol=1e-12)
    # With itself in its baseline a text counts a third less.
    assert torch.allclose(_mean_gradient(weights, base, worth, own=True), exact * 2 / 3, atol=1e-12)


def test_win_rates_are_those_of_all_pairs_of_draws() -> None:
    ours, theirs = np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0, 0.5])
    for n in (1, 2):
        pairs = [(max(a), max(b)) for a in product(ours, repeat=n) for b in product(theirs, repeat=n)]
        exact = np.mean([(a > b) + (a == b) / 2 for a, b in pairs])
        assert win_rate(ours, theirs, n) == pytest.approx(exact)
    assert win_rate(ours, ours, 4) == pytest.approx(0.5)


@pytest.mark.integration
def test_a_model_learns_what_is_rewarded_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    asked, model = puzzle("chain:operations=1"), quantized(random_transformer(TransformerShape(16, 1, 2, 16, 64), 5))
    # Texts that end are better than those that are cut, and short ones best.
    scorer = TextScore(lambda text: 1 - len(text) / 20)
    learning = {"calibrate": "identity", "beta": 0.02, "steps": 10, "lr": 2e-2}
    recipe = GRPORecipe(problems=4, held=3, group=6, reference=12, batch=4, **learning)  # type: ignore[arg-type]
    values = train_grpo(model, asked, scorer, tmp_path / "learned", recipe=recipe)
    assert values["reward"] > values["reward_before"] + 0.2 and values["win_rate"] > 0.7 and values["kl"] > 0.1
    assert train_grpo(model, asked, scorer, tmp_path / "learned", recipe=recipe) == values
    assert load(str(tmp_path / "learned")).model.config.hidden_size == 16
    with pytest.raises(SettingsError, match="beta above 0"):
        GRPORecipe(beta=0.0)
    with pytest.raises(SettingsError, match="groups of at least 2"):
        GRPORecipe(group=1)
