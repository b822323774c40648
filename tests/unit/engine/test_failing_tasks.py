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
from decodery.engine.schedule import Limits
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.speculative.drafters.pearl import Pearl
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine, run_sync, score
from decodery.step.sequence import Sequence
from decodery.testing import Garbage, decode, tiny_transformer, to_int8

MODEL, SMALL = tiny_transformer(0), tiny_transformer(0, num_layers=1)
EXACT = to_int8(MODEL)
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


@pytest.mark.parametrize("kind", [Garbage, PromptLookup])
@pytest.mark.parametrize("number", range(6))
def test_a_drafter_that_cannot_say_what_memory_it_takes_ends_its_own_text_at_once(
    kind: type[Drafter], number: int
) -> None:
    """Whoever asks: to let a text in, to begin a step, or to gather texts in arrays."""
    lengths = list[int]()

    class Unsure(kind):  # type: ignore[misc, valid-type]
        def more_for(self, seq: Sequence, tokens: int) -> int:
            lengths.append(len(seq.tokens))
            if len(lengths) > number:
                raise RuntimeError("broken on purpose")
            return 0

    engine = Engine(EXACT, limits=Limits(cache_bytes=1 << 20))
    broken = engine.submit(Request(PROMPTS[0], drafter=Unsure(), max_new_tokens=12))
    others = [engine.submit(Request(prompt, drafter=kind(), max_new_tokens=40)) for prompt in PROMPTS[1:3]]
    engine.run(others)
    assert [seq.generated for seq in others] == [
        each.generated for each in decode(EXACT, PROMPTS[1:3], max_new_tokens=40)
    ]
    if len(lengths) > number:
        assert "on purpose" in str(broken.error) and len(broken.tokens) == lengths[number]
    else:
        assert broken.error is None and number > 2
    assert not engine.running


@pytest.mark.parametrize("number", range(3))
def test_a_drafter_that_cannot_say_whether_it_asks_ends_its_own_text(number: int) -> None:
    """Where texts are gathered in arrays, and where drafters propose for several texts."""
    asked = list[int]()

    class Unsure(PromptLookup):
        def asks(self, seq: Sequence) -> bool:
            asked.append(len(seq.tokens))
            if len(asked) > number:
                raise RuntimeError("broken on purpose")
            return True

    engine = Engine(EXACT)
    broken = engine.submit(Request(PROMPTS[0], drafter=Unsure(), max_new_tokens=12))
    other = engine.submit(Request(PROMPTS[1], max_new_tokens=40))
    engine.run([other])
    assert "on purpose" in str(broken.error) and len(broken.tokens) == asked[number]
    assert other.generated == decode(EXACT, PROMPTS[1:2], max_new_tokens=40)[0].generated


@pytest.mark.parametrize("part", ["forget", "drops_models"])
def test_a_drafter_that_cannot_do_without_memory_ends_its_own_text(part: str) -> None:
    """An owner's only text that takes too much goes on without drafts, unless its drafter breaks."""

    class Greedy(Garbage):
        def more_for(self, seq: Sequence, tokens: int) -> int:
            return 1 << 30

        def forget(self, seq: Sequence) -> None:
            self.breaks("forget")

        def drops_models(self, seq: Sequence) -> bool:
            self.breaks("drops_models")
            return False

        def breaks(self, where: str) -> None:
            if where == part:
                raise RuntimeError("broken on purpose")

    engine = Engine(MODEL, limits=Limits(cache_bytes=1 << 20, owner_part=0.5))
    requests = [Request(prompt, max_new_tokens=12) for prompt in PROMPTS[:3]]
    requests[0].drafter, requests[0].cache_namespace = Greedy(), "one"
    broken, *others = [engine.submit(request) for request in requests]
    engine.run(others)
    assert "on purpose" in str(broken.error)
    assert_plain(others, 12, first=1)


@pytest.mark.parametrize("others", [0, 2])
def test_a_drafter_that_breaks_when_a_pass_finds_no_memory_ends_its_own_text(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    class Broken(Pearl):
        def forget(self, seq: Sequence) -> None:
            raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Pearl, "more_for", Drafter.more_for)
    engine = Engine(MODEL, limits=Limits(cache_bytes=(60 + 10 * others) * MODEL.new_cache().slot_bytes))
    broken = engine.submit(Request(PROMPTS[0] * 8, drafter=Broken(SMALL), max_new_tokens=40))
    texts = [engine.submit(Request(prompt, max_new_tokens=12)) for prompt in PROMPTS[1 : 1 + others]]
    while not (broken.finished and all(text.finished for text in texts)):
        engine.step()
    assert "on purpose" in str(broken.error)
    assert_plain(texts, 12, first=1) if texts else None
