"""The steps that `auto` would take without its adviser: the credit of what the adviser brings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import decodery.speculative.drafters.auto_advised as advised_module
import decodery.speculative.drafters.model_advice as advice_module
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.speculative.drafters.advice import Advice
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.unadvised import UnadvisedSteps, accepted, split
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Memory
from decodery.step.sequence import Sequence
from decodery.testing import TableModel

ROW = 0.05


def chain(*tokens: int) -> DraftTree:
    return DraftTree(np.array(tokens), np.arange(len(tokens)) - 1)


def test_a_token_that_would_have_been_drafted_a_step_later_saves_nothing() -> None:
    """Without the adviser: 5, then 6 7 8 of a draft. With it 5 6 at once, and then 7 8: two steps each."""
    text = [1, 5, 6]
    steps = UnadvisedSteps(chain(1), 1.0, 1, 1)
    assert steps.follow(text) and steps.read == 2
    steps = steps.next(chain(5, 6, 7), 1.0)
    assert not steps.follow(text)
    # Of the second step one of three tokens is there; what compares single steps gives the adviser a whole step.
    assert steps.seconds - 1.0 == pytest.approx(1 / 3)
    assert 1 - accepted(chain(1), [5, 6]) == 1
    text += [7, 8]
    assert steps.follow(text) and steps.read == len(text) and steps.ended
    assert steps.seconds - 2.0 == 0.0


def test_a_token_that_no_draft_had_saves_a_step() -> None:
    text = [1, 5, 6, 7, 8]
    steps = UnadvisedSteps(chain(1), 1.0, 1, 1)
    while steps.follow(text) and steps.read < len(text):
        steps = steps.next(chain(text[steps.read - 1]), 1.0)
    assert steps.ended and steps.seconds == 4.0


def test_a_pass_is_split_where_a_step_without_the_adviser_ends() -> None:
    tree = DraftTree(np.array([1, 5, 9, 6, 7, 3, 4]), np.array([-1, 0, 0, 1, 3, 3, 0]))
    seen = VerificationFeedback(tree, torch.arange(7.0)[:, None], {}, [1, 3, 4], [5, 6, 7, 8], 0)
    first, rest = split(seen, 2)
    # A step that ended with the second token has seen nothing of what came after it.
    assert first.tree.tokens.tolist() == [1, 5, 9, 4] and first.tree.parents.tolist() == [-1, 0, 0, 0]
    assert first.logits[:, 0].tolist() == [0.0, 1.0, 2.0, 6.0]
    assert (first.path, first.emitted, first.start) == ([1], [5, 6], 0)
    assert rest.tree.tokens.tolist() == [6, 7] and rest.tree.parents.tolist() == [-1, 0]
    assert rest.logits[:, 0].tolist() == [3.0, 4.0]
    assert (rest.path, rest.emitted, rest.start) == ([1], [7, 8], 2)


def seconds(seq: Sequence) -> float:
    return sum(1.0 + ROW * (step.rows - 1) for step in seq.trace.decoding)


def texts(drafter: Auto, seed: int) -> list[Sequence]:
    """Two texts after each other, in which n-grams are worth more and more."""
    model = TableModel(24, order=1, seed=seed, spread=6)
    loop = Engine(model, memory=Memory(), pass_seconds=lambda context: 1.0 + ROW * (np.arange(1024) - 1))
    found = []
    for number in range(2):
        sampler = Sampler.from_settings(temperature=0.7)
        seq = loop.submit(Request([1, 2, 3, number], 120, seed=seed, sampler=sampler, drafter=drafter))
        if (advice := seq.states[seq.request.drafter].advice) is not None:
            advice.balance = advice.costs.credit = 1000.0
        loop.run([seq])
        found.append(seq)
    return found


@pytest.mark.parametrize("native", [True, False])
def test_steps_without_the_adviser_are_counted_as_they_would_be(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adviser is said to have saved is what `auto` without it takes longer, over whole texts."""
    if not native:
        monkeypatch.setattr("decodery.speculative.tree_building.native_tree.NativeText.fits", lambda seq, memory: False)
    monkeypatch.setattr(advice_module, "_SHARE", 0.0)
    saved, single, settle, follow = [], [], Advice.settle, advised_module.follow
    monkeypatch.setattr(Advice, "settle", lambda advice, each: (saved.append(each), settle(advice, each))[1])

    def following(drafter: Auto, seq: Sequence, seen: VerificationFeedback, most: int) -> VerificationFeedback:
        if (without := seq.states[drafter].advice.without) is not None:
            more = len(seen.path) - accepted(without, seen.emitted)
            single.append(more - ROW * (len(seen.tree) - len(without)))
        return follow(drafter, seq, seen, most)

    monkeypatch.setattr("decodery.speculative.drafters.auto.follow", following)
    took, alone = 0.0, 0.0
    for seed in range(2):
        other = TableModel(24, order=1, seed=seed, spread=6)
        with_one = texts(Auto(warm=None, most=8, model=other), seed)
        without = texts(Auto(warm=None, most=8), seed)
        assert [seq.tokens for seq in with_one] == [seq.tokens for seq in without]
        took, alone = took + sum(map(seconds, with_one)), alone + sum(map(seconds, without))
    assert alone > 1.05 * took
    assert took + sum(saved) == pytest.approx(alone, rel=0.03)
    # To compare single steps counts more than there is to save.
    assert took + sum(single) > 1.15 * alone
