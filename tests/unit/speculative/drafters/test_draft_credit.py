"""What drafts of a text may lose is bounded, whatever they promise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

import decodery.speculative.drafters.auto_text as auto_module
import decodery.speculative.drafters.draft_credit as credit_module
import decodery.step.pass_prices as pass_prices_module
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.auto_text import AutoBatch
from decodery.speculative.drafters.draft_credit import DraftCredit, JointCredit
from decodery.speculative.tree_building.native_batch import NativeBatch
from decodery.step.drafter_memory import Memory
from decodery.testing import tiny_transformer, to_int8
from decodery.testing.models import Counted

MODEL = to_int8(tiny_transformer(3))
COSTS = 1.0 + 0.15 * np.arange(17.0) ** 0.5


class Generous(JointCredit):
    """Wrong: forgets what drafts took."""

    def settle(self, accepted: Sequence[int], costs: np.ndarray) -> None:
        super().settle(accepted, np.full(len(costs), costs[0]))


class Mean(JointCredit):
    """Wrong: a step is saved when texts have saved one on average, although each lasts until the slowest has."""

    def settle(self, accepted: Sequence[int], costs: np.ndarray) -> None:
        for each in self._credits:
            each.balance += sum(accepted) / self._sequences - costs[-1] / costs[0] + 1.0


def speed(kind: type[JointCredit], chances: Sequence[float], steps: int, costs: np.ndarray = COSTS) -> float:
    """Speed of texts that end together without drafts, in units of that.

    Args:
        kind: What bounds the drafts.
        chances: [n] of each drafted token of a text; only the texts with the highest chances may draft.
        steps: Tokens of each text.
        costs: Seconds of a step with 0, 1, 2, ... drafted tokens, without what each text takes beside its row.
    """
    generator, left, seconds, plain = np.random.default_rng(0), np.full(len(chances), steps), 0.0, 0.0
    credits = [DraftCredit() for _ in chances]
    while (active := np.flatnonzero(left > 0)).size:
        rows = costs[active.size - 1 :]
        credit = kind([credits[text] for text in active], active.size)
        credit.step()
        nodes, accepted = np.zeros(active.size, dtype=int), np.zeros(active.size, dtype=int)
        worth = credit.weights(rows) * np.array(chances)[active]
        for _ in range(min(credit.affords(rows), 8 * active.size)):
            best = int(
                np.argmax(worth * np.array(chances)[active] ** nodes * (nodes < np.minimum(left[active] - 1, 8)))
            )
            nodes[best] += 1
        for text, size in enumerate(nodes):
            accepted[text] = np.cumprod(generator.random(size) < chances[active[text]]).sum()
        if drafted := int(nodes.sum()):
            credit.settle(accepted.tolist(), rows[: drafted + 1])
        left[active] -= 1 + accepted
        seconds, plain = seconds + rows[drafted], costs[len(chances) - 1] * steps
    return plain / seconds


@pytest.mark.parametrize(("steps", "least"), [(64, 0.98), (1000, 0.994)])
def test_drafts_in_vain_are_bounded_and_good_ones_are_not(steps: int, least: float) -> None:
    assert speed(JointCredit, [0.0], steps) > least
    assert speed(Generous, [0.0], steps) < 0.75
    assert speed(JointCredit, [0.7], steps) == speed(Generous, [0.7], steps) > 1.5
    # Drafts that pay on average go on after some that did not.
    assert speed(JointCredit, [0.4], 1000) > 1.05


@pytest.mark.parametrize("row", [0.01, 0.1, 1.0])
def test_no_text_waits_for_drafts_of_others(row: float) -> None:
    """Of a part of the step that all texts share and of rows that cost so much beside it."""
    costs = 1.0 + row * np.arange(64.0)
    assert speed(JointCredit, [0.9, 0.0, 0.0, 0.0], 64, costs) > 0.99
    # Rows that take as long as a step are not affordable at all.
    assert (speed(Mean, [0.9, 0.0, 0.0, 0.0], 64, costs) < 0.95) == (row < 1)
    assert speed(JointCredit, [0.0] * 4, 64, costs) > 0.99
    # Where all texts are faster each of them may be.
    assert speed(JointCredit, [0.9, 0.8, 0.8, 0.9], 400, 1.0 + 0.01 * np.arange(64.0)) > 2


@pytest.mark.parametrize(("balance", "tokens"), [(-0.2, 0), (0.0, 0), (0.16, 1), (0.3, 4), (9.0, 16)])
def test_a_balance_affords_so_many_tokens(balance: float, tokens: int) -> None:
    credit = JointCredit([DraftCredit(balance), DraftCredit(balance + 1)], 1)
    assert credit.affords(COSTS) == tokens
    assert credit.waits(COSTS) == {-0.2: 64, 0.0: 38}.get(balance, 0)


@pytest.mark.parametrize("texts", [1, 4])
@pytest.mark.parametrize("arrays", [True, False])
def test_texts_draft_as_long_as_there_is_credit(texts: int, arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts that cost little: with the credit of a new text, and of one that has none and gets none."""

    def drafted(first: float) -> tuple[int, list[list[int]]]:
        pass_prices_module._known.clear()
        monkeypatch.setattr(DraftCredit.__init__, "__defaults__", (first, 0.0))
        monkeypatch.setattr(credit_module, "SHARE", 0.0)
        monkeypatch.setattr(auto_module, "SHARE", 0.0)
        monkeypatch.setattr(auto_module, "perf_counter", float)
        engine = Engine(MODEL if arrays else Counted(MODEL), memory=Memory())
        learn = engine._budgets.learn

        def learned(rows: int, count: int, context: float, _: Any) -> None:
            learn(rows, count, context, 0.01 + 0.0001 * rows)

        monkeypatch.setattr(engine._budgets, "learn", learned)
        seqs = [engine.submit(Request([1, 2, 3, 1, 2, 3 + n], 40, drafter=Auto(warm=None))) for n in range(texts)]
        engine.run(seqs)
        return sum(seq.trace.rows - seq.trace.passes for seq in seqs), [seq.tokens for seq in seqs]

    (many, tokens), (none, same) = drafted(1.2), drafted(0.0)
    assert none == 0 and many > 0 and same == tokens


@pytest.mark.parametrize("charged", [True, False])
def test_looking_is_paid_for_whether_or_not_anything_is_drafted(charged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that take a fifth of a step each, by a watch of this test; texts of random tokens show nothing to draft."""
    pass_prices_module._known.clear()
    watch, looks, texts, steps = count(step=0.001), 0, 4, 100
    monkeypatch.setattr(auto_module, "perf_counter", lambda: next(watch))
    if not charged:
        monkeypatch.setattr(NativeBatch, "charge", lambda batch, *seconds: None)
    engine = Engine(MODEL, memory=Memory())
    learn = engine._budgets.learn
    monkeypatch.setattr(engine._budgets, "learn", lambda rows, n, length, _: learn(rows, n, length, 0.01 + 1e-5 * rows))
    sampler = Sampler.from_settings(temperature=9.0)
    seqs = [
        engine.submit(Request([1 + number, 2, 3], steps, sampler=sampler, drafter=Auto(warm=None)))
        for number in range(texts)
    ]
    while not all(seq.finished for seq in seqs):
        engine.step()
        batches = [each for each in engine._arrays._drafts if isinstance(each, AutoBatch)]
        looks += sum(each.looked and not each.resting for each in batches)
    # What may be lost at first and what is added are half a step and four in a thousand steps.
    assert (looks * 0.2 < 0.2 + 0.004 * steps + 0.2) == charged
