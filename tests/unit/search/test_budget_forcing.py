"""Budget forcing: thinking is as long as asked for, and what was taken back leaves no trace."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from covering import FULL, in_turn
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.budget_forcing import BudgetForcing
from decodery.step.sequence import Sequence
from decodery.testing import decode
from decodery.testing.states import distance_to_fresh
from decodery_benchmarks.puzzles.alphabet import tokenizer
from methods import DRAFTERS
from sampled import MODEL, OTHER, PROMPT, run
from scripted import Scripted

END, WAIT, EOS = (7, 8), (5, 6), 1
PENALISED = Sampler.from_settings(temperature=1.0, repetition_penalty=1.3)


def scripted(text: list[int], search: BudgetForcing, **settings: Any) -> list[int]:
    """What is written by a model that says the text whatever it reads, place by place."""
    request = Request([2], max_new_tokens=30, eos_ids=(EOS,), **settings)
    (seq,) = search.run(Engine(Scripted([2, *text])), request)
    assert seq.trace.ledger.tokens >= len(seq.generated)
    return seq.generated


def test_ends_are_taken_back_as_often_as_asked() -> None:
    text = [9, 9, *END, 3, 3, *END, 4, EOS]
    assert scripted(text, BudgetForcing(END, WAIT, ignore=0)) == text
    assert scripted(text, BudgetForcing(END, WAIT, ignore=1)) == [9, 9, *WAIT, 3, 3, *END, 4, EOS]
    assert scripted(text, BudgetForcing(END, WAIT, ignore=2)) == [9, 9, *WAIT, 3, 3, *WAIT, 4, EOS]
    # An end of the text counts as one of thinking.
    assert scripted([9, EOS, 3, *END, EOS], BudgetForcing(END, (5,), ignore=1)) == [9, 5, 3, *END, EOS]


def test_thinking_is_ended_where_it_takes_too_long() -> None:
    text = [9, 9, 9, 9, 3, 3, 3, *END, 4, EOS]
    for most in range(1, 8):
        found = scripted(text, BudgetForcing(END, WAIT, (10,), ignore=0, most=most))
        assert found[: most + 3] == [*text[:most], *END, 10]
    for most in (8, 9, 20):
        assert scripted(text, BudgetForcing(END, WAIT, (10,), ignore=0, most=most)) == text
    # What was written in place of an end is thinking too.
    found = scripted(text, BudgetForcing(END, WAIT, ignore=1, most=9))
    assert found[:11] == [*text[:7], *WAIT, *END]


@cache
def _plain(search: BudgetForcing, seed: int) -> Sequence:
    return run(search, seed=seed, max_new_tokens=30, sampler=PENALISED, eos_ids=(0,))[0]


FORCED = {"twice": BudgetForcing((13,), (5, 6), ignore=2, most=20), "once": BudgetForcing((48,), (5,))}


@pytest.mark.parametrize(
    ("drafter", "name"),
    in_turn(["none", "auto", "draft-model", "prompt-lookup", "token-recycling", "eagle"], list(FORCED)),
)
def test_drafts_change_nothing_and_the_cache_holds_what_is_seen(drafter: str, name: str) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 30, "sampler": PENALISED, "eos_ids": (0,)}
    search, drawn = FORCED[name], None if drafter == "none" else DRAFTERS[drafter](OTHER)
    for seed in range(3 if FULL else 1):
        plain = _plain(search, seed)
        (seq,) = run(search, seed=seed, drafter=drawn, **settings)
        assert seq.generated == plain.generated and distance_to_fresh(MODEL, seq) < 1e-9
        # Penalties know the text as it is, and nothing of what was taken back.
        assert str(seq.processor_states) == str(plain.processor_states)


def test_without_a_budget_it_is_plain_decoding() -> None:
    settings: dict[str, Any] = {"sampler": PENALISED, "max_new_tokens": 20, "eos_ids": (0, 3)}
    for seed in range(2):
        (plain,) = decode(MODEL, [PROMPT], seeds=(seed,), **settings)
        (seq,) = run(BudgetForcing((13,), WAIT, ignore=0), seed=seed, **settings)
        assert seq.generated == plain.generated and seq.trace.ledger.counts["discarded"] == 0


def test_wrong_input_is_named() -> None:
    for settings in ({"ignore": -1}, {"most": 0}, {"end": ""}, {"wait": ""}):
        with pytest.raises(SettingsError, match="budget-forcing"):
            BudgetForcing(**settings)
    with pytest.raises(SettingsError, match="give token ids"):
        run(BudgetForcing())
    # An alphabet without "Wait" is no matter where nothing is taken back.
    assert BudgetForcing("#", ignore=0).bind(tokenizer()).wait == ()
    with pytest.raises(SettingsError, match="'Wait', which this model's tokenizer cannot write"):
        BudgetForcing("#").bind(tokenizer())
