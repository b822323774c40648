"""Constraints as users write them: drafts and arrays change nothing, and what a guess leads to ends no text."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from decodery.constraints import Regex
from decodery.core.errors import ConstraintError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.step_arrays import StepArrays
from decodery.sampling.constraint import Constrained, Constraint
from decodery.sampling.logits_processor import Context
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.sampling.sampler import Sampler
from decodery.sampling.timed import Clock, timed
from decodery.speculative.drafters.forced_batch import ForcedBatch
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.draft_batch import DraftBatch, JointBudget
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from languages import ENDS, TARGET, VOCABULARY

SIZE = VOCABULARY.size


class Own(Constraint):
    """All tokens but the ends."""

    def init(self, prompt: Any) -> tuple[int, ...]:
        return ()

    def allowed(self, state: tuple[int, ...]) -> np.ndarray:
        mask = np.ones(SIZE, dtype=bool)
        mask[list(ENDS)] = False
        return mask

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def is_complete(self, state: tuple[int, ...]) -> bool:
        return False


def only(*tokens: int) -> np.ndarray:
    mask = np.zeros(SIZE, dtype=bool)
    mask[list(tokens)] = True
    return mask


def texts(sampler: Sampler, count: int, drafter: Drafter | None = None) -> list[Sequence]:
    """Texts whose prompt holds what drafters copy: tokens 41 to 43, then 99."""
    engine = Engine(TARGET)
    prompts = [[41, 42, 43, 99, 45, 46, 47, 48, 49, 50 + number] for number in range(count)]
    settings = {"max_new_tokens": 9, "eos_ids": ENDS, "sampler": sampler, "drafter": drafter}
    seqs = [engine.submit(Request(prompt, **settings)) for prompt in prompts]
    while not all(seq.finished for seq in seqs):
        engine.step()
    return seqs


class Failing(Own):
    """Writes 41 to 43 and then anything; after a token 99 nothing is known."""

    def allowed(self, state: tuple[int, ...]) -> np.ndarray:
        if 99 in state:
            raise ConstraintError("too complex")
        return only(41 + len(state), 120) if len(state) < 3 else super().allowed(state)


class FailingAhead(Failing):
    """The same, and says so when it is told of the token."""

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        if token == 99:
            raise ConstraintError("too complex")
        return super().advance(state, token)


@pytest.mark.parametrize("kind", [Failing, FailingAhead])
@pytest.mark.parametrize("count", [1, 2])
def test_where_a_constraint_fails_after_a_guess_the_text_goes_on(count: int, kind: type[Failing]) -> None:
    sampler = Sampler([Constrained(kind())])
    plain, drafted = (texts(sampler, count, drafter) for drafter in (None, PromptLookup(max_ngram=1)))
    assert [(seq.tokens, seq.error) for seq in drafted] == [(seq.tokens, None) for seq in plain]
    assert all(step.nodes for step in drafted[0].trace.steps[1:2]), "nothing was guessed"


@dataclass(frozen=True)
class Favouring(Constrained):
    """Applies its constraint in a way of its own."""

    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        found = super().process(logits, contexts).clone()
        found[:, 12] += 100
        return found


@pytest.mark.parametrize("count", [1, 3])
def test_a_constrained_processor_of_another_kind_is_applied_as_it_says(count: int) -> None:
    assert native_processors(Sampler([Favouring(Own())]), SIZE) is None
    assert all(seq.generated == [12] * 9 for seq in texts(Sampler([Favouring(Own())]), count))


def test_a_timed_constraint_is_applied_as_any_other() -> None:
    clock, sampler = Clock(), Sampler([Constrained(Own()), "temperature:t=0.8"])
    measured = timed(sampler, clock)
    assert isinstance(native_processors(measured, SIZE), NativeProcessors)
    assert [seq.tokens for seq in texts(measured, 3)] == [seq.tokens for seq in texts(sampler, 3)]
    assert clock.seconds > 0


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_a_mask_may_be_of_numbers(kind: type[np.generic]) -> None:
    class Numbers(Own):
        def allowed(self, state: tuple[int, ...]) -> np.ndarray:
            return super().allowed(state).astype(kind)

    assert (Numbers().bits((), SIZE) == Own().bits((), SIZE)).all()
    found, plain = (texts(Sampler([Constrained(each)]), 2) for each in (Numbers(), Own()))
    assert [(seq.tokens, seq.error) for seq in found] == [(seq.tokens, None) for seq in plain]


def test_texts_that_may_write_anything_share_their_mask() -> None:
    class Idle(Own):
        def idle(self, state: tuple[int, ...]) -> bool:
            return True

    found = Idle().bits((), SIZE)
    assert found is Idle().bits((1,), SIZE) and not found.flags.writeable
    assert np.unpackbits(found.view(np.uint8)).sum() == SIZE


def test_one_token_is_looked_up_without_the_whole_mask() -> None:
    constraint = Regex("[a-z]{2,5} 1").compile(VOCABULARY)
    known, fresh = constraint.init([]), constraint.init([])
    constraint.bits(known, SIZE)
    found = [(constraint.permits(known, token), constraint.accepts(known, token)) for token in range(SIZE)]
    assert known.mask is None
    assert found == [(each, each) for each in constraint.allowed(fresh).tolist()]


def test_what_was_guessed_is_forgotten_where_drafting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed, fails = list[dict[int, int]](), False
    propose = ForcedBatch.propose

    def proposed(batch: ForcedBatch, steps: StepArrays, budget: JointBudget) -> int:
        nonlocal fails
        before, inner = dict(batch._guessed), batch._drafts
        if before:
            fails = True
            monkeypatch.setattr(type(inner), "propose", broken)
        try:
            return propose(batch, steps, budget)
        finally:
            if before:
                guessed.append(dict(batch._guessed))

    def broken(batch: DraftBatch, steps: StepArrays, budget: JointBudget) -> int:
        raise RuntimeError("broken on purpose")

    class Forcing(Own):
        def allowed(self, state: tuple[int, ...]) -> np.ndarray:
            return only(60 + len(state) % 7) if len(state) % 4 else super().allowed(state)

    monkeypatch.setattr(ForcedBatch, "propose", proposed)
    texts(Sampler([Constrained(Forcing())]), 2, PromptLookup(max_ngram=1))
    assert fails and guessed[0] == {}
