"""A drafter, search or text that fails ends by itself, and others go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from decodery.core.errors import OutOfMemory
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine, run_sync, score
from decodery.step.sequence import Sequence
from decodery.testing import Garbage, decode, tiny_transformer

MODEL, SMALL = tiny_transformer(0), tiny_transformer(0, num_layers=1)
PROMPTS = [[1 + number, 2, 3, 5 + number % 7] for number in range(16)]


@cache
def plain(n: int, first: int, last: int) -> list[list[int]]:
    return [run.generated for run in decode(MODEL, PROMPTS[first:last], max_new_tokens=n)]


def assert_plain(texts: list[Sequence], n: int, first: int = 0) -> None:
    """Greedy texts of the prompts from number `first` on are what they are alone."""
    assert [text.generated for text in texts] == plain(n, first, first + len(texts))


# An error ends one task.


@dataclass(frozen=True)
class Faulty(Drafter):
    """Breaks in one of its parts once a text has a few tokens."""

    part: str
    error: Exception = field(default_factory=lambda: RuntimeError("broken on purpose"), compare=False)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        if seq.position > 3:
            if self.part == "propose":
                raise self.error
            if self.part == "budget":
                return DraftTree.chain(seq.last_token, [1] * (budget.nodes + 1))
            if self.part == "tokens":
                return DraftTree.chain(seq.last_token, [-1])
            if self.part == "cycle":
                return DraftTree(np.array([seq.last_token, 1, 2]), np.array([-1, 2, 1]))
        return DraftTree.chain(seq.last_token, [1])

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        if self.part == "observe" and seq.position > 3:
            raise self.error


ERRORS = RuntimeError("x"), KeyError(3), OutOfMemory("no memory"), MemoryError()


@pytest.mark.parametrize(
    ("part", "error"),
    [
        *product(("propose", "observe"), ERRORS),
        # What these draft is found out by the loop, which has an error of its own.
        *product(("budget", "tokens", "cycle"), ERRORS[:1]),
    ],
)
def test_a_drafter_that_breaks_ends_its_own_text_alone(part: str, error: Exception) -> None:
    engine = Engine(MODEL)
    broken = engine.submit(Request(PROMPTS[0], drafter=Faulty(part, error), max_new_tokens=12))
    texts = [engine.submit(Request(prompt, drafter=Garbage(), max_new_tokens=12)) for prompt in PROMPTS[1:4]]
    engine.run(texts)
    assert broken.finish_reason == "error" and 3 < broken.position < 12
    assert part not in ("propose", "observe") or broken.error is error
    assert_plain(texts, 12, first=1)
    with pytest.raises(type(error) if part in ("propose", "observe") else ValueError):
        engine.run([broken])


@pytest.mark.parametrize("alone", [False, True])
def test_a_text_without_memory_waits_for_others_and_fails_alone(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    engine = Engine(MODEL)
    texts = [engine.submit(Request(prompt, max_new_tokens=20)) for prompt in PROMPTS[1 : 2 if alone else 4]]
    for _ in range(3):
        engine.step()
    reserve, poor, refused = KVCache.reserve, texts[0].cache, []

    def limited(self: KVCache, *settings: Any, **more: Any) -> None:
        if self is poor:
            refused.append(self)
            raise OutOfMemory("no memory for this one")
        reserve(self, *settings, **more)

    monkeypatch.setattr(KVCache, "reserve", limited)
    if alone:
        with pytest.raises(OutOfMemory, match="no memory for this one"):
            engine.run(texts)
        return
    while not texts[1].finished:
        engine.step()
        assert texts[0].position == 3 or texts[1].finished
    engine.run(texts)
    assert refused
    plain = decode(MODEL, PROMPTS[1:4], max_new_tokens=20)
    assert [text.generated for text in texts] == [run.generated for run in plain]


def test_a_search_that_breaks_ends_alone() -> None:
    def broken(engine: Engine) -> ForwardCoroutine[None]:
        seq = engine.open(Request(PROMPTS[0]))
        yield from score(MODEL, Segment.chunk(seq.tokens, seq.cache))
        raise LookupError("broken on purpose")

    engine = Engine(MODEL)
    job, seq = engine.enter(broken(engine)), engine.submit(Request(PROMPTS[1], max_new_tokens=9))
    with pytest.raises(LookupError):
        engine.run([seq, job])
    assert seq.position == 9
    assert run_sync(as_coroutine(5)) == 5
