"""LQ-LoRA: planted parts are found again, budgets kept at the lowest price, weights count for what hangs on them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from decodery.compression import LQLoRA
from decodery.compression.base import LINEARS, transformed
from decodery.compression.budget import cheapest
from decodery.compression.fisher import Means, fisher_means
from decodery.compression.lq_lora import Decomposition, normal_float
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import tiny_transformer

MODEL = tiny_transformer(0)
TEXTS = [np.random.default_rng(seed).integers(0, 64, 24) for seed in range(6)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_low_rank_part_takes_what_few_bits_cannot() -> None:
    levels = normal_float(4)
    assert len(levels) == 16 and levels[0] == -1.0 and levels[-1] == 1.0 and levels[7] == 0.0
    weight = MODEL.weights.layers[0].gate_up.weight
    assert isinstance(weight, torch.Tensor)
    low = drawn(128, 2) @ weight[:2] * 3
    found = LQLoRA(bits=3, rank=2).decompose(weight + low)
    kept = float((weight + low - found.total).norm())
    # The best turn is the one that counts, and errors fall until then.
    assert kept == pytest.approx(min(found.errors)) and found.errors[:-1] == sorted(found.errors[:-1], reverse=True)
    alone = LQLoRA(bits=3, rank=0).decompose(weight + low)
    assert kept < 0.7 * alone.errors[0]


def test_planted_parts_are_found_again() -> None:
    split, alone = LQLoRA(bits=2, rank=1, steps=100), LQLoRA(bits=2, rank=0)
    for seed in range(5):
        coarse = split.rounded(split.rounded(drawn(128, 96, seed=seed)))
        low = 0.3 * drawn(128, 1, seed=seed + 10) @ drawn(1, 96, seed=seed + 20)
        # What is missing in the end is what bfloat16 leaves out of two vectors.
        assert min(split.decompose(coarse + low).errors) < 2**-7 * float(low.norm())
        assert alone.decompose(coarse + low).errors[0] > 0.8 * float(low.norm())


def greedy(prices: np.ndarray, sizes: np.ndarray, budget: int) -> float:
    """The smallest levels to begin with, and then always the step that lowers the price most per bit."""
    levels = sizes.argmin(axis=1)
    while True:
        left = budget - sizes[np.arange(len(levels)), levels].sum()
        steps = [
            ((prices[part, now] - prices[part, other]) / (sizes[part, other] - sizes[part, now]), part, other)
            for part, now in enumerate(levels)
            for other in range(sizes.shape[1])
            if 0 < sizes[part, other] - sizes[part, now] <= left and prices[part, other] < prices[part, now]
        ]
        if not steps:
            return float(prices[np.arange(len(levels)), levels].sum())
        _, part, other = max(steps)
        levels[part] = other


def test_a_budget_is_kept_at_the_lowest_price() -> None:
    chosen_better = 0
    for seed in range(20):
        chance = np.random.default_rng(seed)
        sizes = chance.integers(1, 40, (7, 4))
        prices = chance.exponential(size=(7, 4)) * 40 / sizes
        budget = int(chance.integers(sizes.min(axis=1).sum(), sizes.max(axis=1).sum()))
        found = cheapest(prices.tolist(), sizes.tolist(), budget)
        places = np.arange(7)
        price = prices[places, found].sum()
        assert sizes[places, found].sum() <= budget
        states = np.array(list(product(range(4), repeat=7)))
        fits = states[sizes[places, states].sum(axis=1) <= budget]
        assert price == pytest.approx(prices[places, fits].sum(axis=1).min())
        program = milp(
            prices.ravel(),
            constraints=[
                LinearConstraint(np.kron(np.eye(7), np.ones(4)), 1, 1),
                LinearConstraint(sizes.ravel().astype(float), 0, budget),
            ],
            integrality=np.ones(28),
            bounds=Bounds(0, 1),
        )
        assert price == pytest.approx(program.fun)
        assert price <= greedy(prices, sizes, budget) + 1e-9
        chosen_better += price < greedy(prices, sizes, budget) - 1e-9
    # What takes the best step each time is not always there.
    assert chosen_better >= 3
    # Where steps are coarse, sizes are rounded up and the budget is kept all the same.
    wide = [[10**6 + 1, 3 * 10**6 + 7], [10**6 + 3, 2 * 10**6 + 9]]
    assert cheapest([[4.0, 1.0], [3.0, 1.0]], wide, 4_100_000) == [1, 0]
    with pytest.raises(SettingsError, match="too small"):
        cheapest([[1.0]], [[10]], 9)


def test_matrices_get_their_own_bits_within_one_budget() -> None:
    uneven = tiny_transformer(0)
    for layer in uneven.weights.layers:
        assert isinstance(layer.down, Dense)
        # Far larger than the others: what is missing here is nearly all that is missing.
        layer.down.weight = 30 * layer.down.weight
    code = LQLoRA(rank=2).code
    alike, same = transformed(uneven, [LQLoRA(rank=2)])
    chosen, report = transformed(uneven, [LQLoRA(rank=2, budget=code)])
    assert report.after.bytes <= same.after.bytes

    def missing(copy: Transformer) -> float:
        pairs = zip(uneven.weights.layers, copy.weights.layers, strict=True)
        return sum(
            float((getattr(a, name).weight - getattr(b, name).weight).square().sum())
            for a, b in pairs
            for name in LINEARS
        )

    assert missing(chosen) < 0.5 * missing(alike)
    share = {part.name: 8 * part.size.bytes / np.prod(getattr(uneven.weights.layers[0], part.name[9:]).shape)
             for part in report.stages[0].parts if part.name.startswith("layers.0.")}  # fmt: skip
    assert share["layers.0.down"] > max(share["layers.0.qkv"], share["layers.0.gate_up"]) + 2


def test_rows_and_columns_count_for_what_they_matter() -> None:
    weight = drawn(48, 64)
    split = LQLoRA(bits=2, rank=4)
    alike = Means(torch.ones(48).double(), torch.ones(64).double())
    plain, uniform = split.decompose(weight), split.decompose(weight, alike)
    assert all(torch.equal(getattr(plain, name), getattr(uniform, name)) for name in ("coarse", "first", "second"))
    rows = alike.rows.clone()
    rows[:4] = 20.0
    weighed = split.decompose(weight, Means(rows, alike.columns))

    def missing(found: Decomposition) -> float:
        return float((weight - found.total)[:4].norm())

    assert missing(weighed) < 0.5 * missing(plain)
    assert split.decompose(weight, Means(rows, alike.columns)).errors[0] > plain.errors[0]


def test_gradients_tell_what_matters() -> None:
    means = fisher_means(MODEL, TEXTS)
    assert set(means) == {f"layers.{index}.{name}" for index in range(MODEL.config.num_layers) for name in LINEARS}
    assert all(each.rows.mean() == pytest.approx(1, abs=0.01) for each in means.values())
    # By differences of losses, for two columns of one text: means are relative.
    text, column, other = TEXTS[0], 5, 9
    squares = []
    for place in (column, other):
        slopes = []
        for row in range(32):
            losses = []
            for step in (1e-5, -1e-5):
                moved = tiny_transformer(0)
                linear = moved.weights.layers[0].down
                assert isinstance(linear, Dense)
                linear.weight = linear.weight.clone()
                linear.weight[row, place] += step
                logits = moved.forward(Batch([Segment(np.arange(len(text)), tokens=text)])).logits
                losses.append(float(-logits[:-1].log_softmax(-1).gather(1, torch.from_numpy(text[1:])[:, None]).mean()))
            slopes.append((losses[0] - losses[1]) / 2e-5)
        squares.append(np.square(slopes).mean())
    columns = fisher_means(MODEL, [text])["layers.0.down"].columns
    assert float(columns[column] / columns[other]) == pytest.approx((squares[0] / squares[1]) ** 0.5, rel=1e-4)
    assert abs(float(columns[column] / columns[other]) - 1) > 1e-2
    # What matrices count for beside each other: the roots of the mean squares of all their gradients.
    for name in ("qkv", "down"):
        clone = tiny_transformer(0)
        weight = getattr(clone.weights.layers[1], name).weight.requires_grad_()
        total = torch.zeros(())
        for text in TEXTS:
            logits = clone.forward(Batch([Segment(np.arange(len(text)), tokens=text)])).logits
            loss = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(text[1:]))
            total = total + torch.autograd.grad(loss, weight)[0].square().mean()
        found = means[f"layers.1.{name}"]
        spread = (found.rows.square().mean() * found.columns.square().mean()).sqrt()
        assert found.size * float(spread) == pytest.approx(float(total.sqrt()), rel=1e-3)
    again = fisher_means(MODEL, TEXTS[:3])
    assert not torch.allclose(again["layers.0.down"].columns, means["layers.0.down"].columns)
    with pytest.raises(SettingsError, match="must read a text"):
        transformed(MODEL, [LQLoRA(fisher=True)])
    changed, report = transformed(MODEL, [LQLoRA(rank=2, fisher=True, budget=3.3)], TEXTS)
    assert 0 < report.stages[0].error < 1 and isinstance(changed, Transformer)


def test_what_cannot_be_is_refused() -> None:
    for bad in ("lq-lora:rank=-1", "lq-lora:budget=1", "lq-lora:block=0"):
        with pytest.raises(SettingsError):
            resolve("compression", bad)
    with pytest.raises(SettingsError, match="too small"):
        transformed(MODEL, [LQLoRA(budget=2.0)])
