"""What drafts of a text may lose is bounded, whatever they promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import decodery.speculative.drafters.auto_text as auto_module
import decodery.speculative.drafters.draft_credit as credit_module
import decodery.step.pass_prices as pass_prices_module
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.draft_credit import DraftCredit
from decodery.step.drafter_memory import Memory
from decodery.testing import tiny_transformer, to_int8
from decodery.testing.models import Counted

MODEL = to_int8(tiny_transformer(3))
COSTS = 1.0 + 0.15 * np.arange(17.0) ** 0.5


class Generous(DraftCredit):
    """Wrong: forgets what drafts took."""

    def settle(self, gained: float, spent: float) -> None:
        self.balance += gained


def speed(credit: DraftCredit, chance: float, steps: int) -> float:
    """Tokens per second, in units of none drafted, of drafts of up to 8 tokens that come true with some chance."""
    generator, tokens, seconds = np.random.default_rng(0), 0.0, 0.0
    for _ in range(steps):
        credit.step()
        nodes = min(credit.affords(COSTS), 8)
        gained = int(np.cumprod(generator.random(nodes) < chance).sum())
        tokens, seconds = tokens + 1 + gained, seconds + COSTS[nodes]
        if nodes:
            credit.settle(gained, COSTS[nodes] / COSTS[0] - 1)
    return tokens / seconds


@pytest.mark.parametrize("steps", [64, 1000])
def test_drafts_in_vain_take_one_step_in_a_hundred_and_good_ones_what_they_like(steps: int) -> None:
    assert speed(DraftCredit(), 0.0, steps) > 0.985
    assert speed(Generous(), 0.0, steps) < 0.75
    assert speed(DraftCredit(), 0.7, steps) == speed(Generous(), 0.7, steps) > 1.5
    # Drafts that pay on average go on after some that did not.
    assert speed(DraftCredit(), 0.4, 1000) > 1.05


@pytest.mark.parametrize(("balance", "tokens"), [(-0.2, 0), (0.0, 0), (0.16, 1), (0.3, 4), (9.0, 16)])
def test_a_balance_affords_so_many_tokens(balance: float, tokens: int) -> None:
    assert DraftCredit(balance).affords(COSTS) == tokens


@pytest.mark.parametrize("texts", [1, 4])
@pytest.mark.parametrize("arrays", [True, False])
def test_texts_draft_as_long_as_there_is_credit(texts: int, arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts that cost little: with the credit of a new text, and of one that has none and gets none."""

    def drafted(first: float) -> tuple[int, list[list[int]]]:
        pass_prices_module._known.clear()
        monkeypatch.setattr(DraftCredit.__init__, "__defaults__", (first,))
        monkeypatch.setattr(credit_module, "SHARE", 0.0)
        monkeypatch.setattr(auto_module, "SHARE", 0.0)
        engine = Engine(MODEL if arrays else Counted(MODEL), memory=Memory())
        learn = engine._budgets.learn

        def learned(rows: int, count: int, context: float, _: Any) -> None:
            learn(rows, count, context, 0.01 + 0.0001 * rows)

        monkeypatch.setattr(engine._budgets, "learn", learned)
        seqs = [engine.submit(Request([1, 2, 3, 1, 2, 3 + n], 40, drafter=Auto(warm=None))) for n in range(texts)]
        engine.run(seqs)
        return sum(seq.trace.rows - seq.trace.passes for seq in seqs), [seq.tokens for seq in seqs]

    (many, tokens), (none, same) = drafted(0.5), drafted(0.0)
    assert none == 0 and many > 0 and same == tokens
