"""Constrained texts in arrays: what they are one by one, beside texts without constraints, each with its own errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from threading import get_ident
from typing import Any

import numpy as np
import pytest

from decodery.constraints import Choice, ConstraintSpec, JSONSchema, Regex
from decodery.constraints.reasoning import Reasoning
from decodery.core.errors import ConstraintError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.step_arrays import StepArrays
from decodery.sampling.constraint import Constrained, Constraint
from decodery.sampling.native_processors import NodeMasks
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.forced_batch import ForcedBatch
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.step.draft_batch import JointBudget
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer, to_int8
from decodery.testing.models import Counted
from languages import ENDS, LANGUAGES, PROMPTS, SCHEMA, TARGET, VOCABULARY

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2},
    "truncated": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 1.1, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {97: 2.0}},
}
LONG: dict[str, ConstraintSpec] = {
    **LANGUAGES,
    "list": JSONSchema({"type": "array", "items": SCHEMA, "minItems": 40}),
    "words": Regex("([a-z]{2,5} ){40,60}"),
    "answer": Reasoning(budget=4, answer=Choice(("name name name", "age age"))),
}


@cache
def compiled(name: str) -> Constraint:
    return LONG[name].compile(VOCABULARY)


class Certain(Constraint):
    """Allows tokens by a seed and the number of tokens before; after `limit` of them nothing is known.

    Args:
        limit: Tokens after which `allowed` raises.
        bonus: See `Constraint`.
    """

    def __init__(self, limit: int = 1000, bonus: float | None = None) -> None:
        self.limit, self.bonus = limit, bonus

    def init(self, prompt: Any) -> int:
        return 0

    def allowed(self, state: int) -> np.ndarray:
        if state >= self.limit:
            raise ConstraintError("too complex")
        mask = np.random.default_rng(state).random(VOCABULARY.size) < 0.3
        mask[list(ENDS)] = False
        return mask

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def is_complete(self, state: int) -> bool:
        return False


def request(number: int, constraint: Constraint | None, way: str, **others: Any) -> Request:
    own = Sampler.from_settings(**WAYS[way])
    sampler = own if constraint is None else Sampler((Constrained(constraint), *own.processors))
    settings = {"max_new_tokens": 20 + number % 5, "seed": number, "eos_ids": ENDS, "sampler": sampler} | others
    return Request(PROMPTS[number % 2], **settings)


def mixture(drafter: Drafter | str | None = None) -> list[Request]:
    """Texts under all constraints and in all ways, and beside them texts without."""
    numbers = count()
    constraints: list[Constraint | None] = [*map(compiled, LONG), Certain(), Certain(bonus=3.0), None]
    return [request(next(numbers), each, way, drafter=drafter) for way in WAYS for each in constraints]


def written(model: Any, requests: list[Request]) -> list[Sequence]:
    """Texts of which half come later; their errors are their own."""
    engine = Engine(model, pass_seconds=lambda context: 1.0 + 0.001 * np.arange(1024))
    half, held = len(requests) // 2, set[int]()
    seqs = [engine.submit(each) for each in requests[:half]]
    for steps in range(100):
        seqs += [engine.submit(each) for each in requests[half:] if steps == 3]
        engine.step()
        held |= {id(run.task) for run in engine._arrays.runs}
    assert all(seq.finished for seq in seqs)
    long = {id(seq) for seq in seqs if len(seq.trace.steps) > 2}
    assert long <= held if model is TARGET else not held, "some texts are not in arrays"
    return seqs


def end(engine: Engine, *seqs: Sequence) -> None:
    for _ in range(100):
        engine.step()
    assert all(seq.finished for seq in seqs)


def outcome(seq: Sequence) -> tuple[Any, ...]:
    return seq.tokens, seq.finish_reason, seq.stopped_by, str(seq.error), seq.cache.next_position


def figures(seq: Sequence) -> tuple[Any, ...]:
    steps = [(each.nodes, each.accepted, each.emitted, each.rows, each.choices) for each in seq.trace.steps]
    return outcome(seq), steps, seq.trace.ledger.passes, seq.trace.ledger.rows


DRAFTERS: dict[str, Drafter | str | None] = {
    "none": None,
    "copies": PromptLookup(max_ngram=1),
    "trees": TokenRecycling(nodes=8),
    "auto": Auto(warm=None),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_constrained_texts_in_arrays_are_what_they_are_one_by_one(name: str) -> None:
    drafter = DRAFTERS[name]
    together, apart = written(TARGET, mixture(drafter)), written(Counted(TARGET), mixture(drafter))
    # In arrays what follows forced tokens is not drafted in the same step.
    same = outcome if drafter else figures
    assert [same(seq) for seq in together] == [same(seq) for seq in apart]
    assert [outcome(seq) for seq in together] == [outcome(seq) for seq in written(TARGET, mixture())]
    assert sum(seq.finish_reason == "stop" for seq in together) > 8, "few texts came to their ends"
    accepted = sum(step.accepted > 1 for seq in together for step in seq.trace.steps)
    assert accepted > 20 or drafter is None, "few drafts came true"


@pytest.mark.parametrize("wrong", ["the first mask", "no mask", "the mask of another text"])
def test_wrong_masks_are_other_texts(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = [outcome(seq) for seq in written(Counted(TARGET), mixture())]
    root, known = NodeMasks.root, list[Any]()

    def first(masks: NodeMasks, state: Any) -> None:
        root(masks, masks._states.get(0, state))

    def others(masks: NodeMasks, state: Any) -> None:
        known.append(state)
        root(masks, known[-2] if len(known) > 1 and type(known[-2]) is type(state) else state)

    def free(constraint: Constraint, state: Any, vocab_size: int) -> np.ndarray:
        return np.full((vocab_size + 31) // 32, -1, dtype=np.int32)

    if wrong == "no mask":
        for kind in {type(each.sampler.processors[0].constraint) for each in mixture() if _bound(each)}:  # type: ignore[attr-defined]
            monkeypatch.setattr(kind, "bits", free)
    else:
        monkeypatch.setattr(NodeMasks, "root", first if wrong == "the first mask" else others)
    found = [outcome(seq) for seq in written(TARGET, mixture())]
    assert sum(one != other for one, other in zip(found, right, strict=True)) > len(right) // 3


def _bound(each: Request) -> bool:
    return bool(each.sampler.processors) and isinstance(each.sampler.processors[0], Constrained)


@pytest.mark.parametrize("limit", [0, 1, 7])
@pytest.mark.parametrize("drafter", [None, Auto(warm=None)], ids=["plain", "auto"])
def test_a_constraint_that_breaks_ends_its_own_text(limit: int, drafter: Drafter | None) -> None:
    others = [request(number, compiled("words"), "sampled", drafter=drafter) for number in range(3)]
    expected = [outcome(seq) for seq in written(Counted(TARGET), others)]
    engine = Engine(TARGET)
    broken = engine.submit(request(9, Certain(limit), "sampled", drafter=drafter))
    beside = [engine.submit(each) for each in others]
    end(engine, broken, *beside)
    assert isinstance(broken.error, ConstraintError) and (broken.position == limit or drafter is not None)
    assert [outcome(seq) for seq in beside] == expected


def test_a_mask_of_another_size_ends_its_own_text() -> None:
    class Small(Certain):
        def allowed(self, state: int) -> np.ndarray:
            return super().allowed(state)[: 290 if state == 5 else None]

    engine = Engine(TARGET)
    wrong, right = (engine.submit(request(0, each, "greedy")) for each in (Small(), Certain()))
    end(engine, wrong, right)
    assert "is for 290 tokens" in str(wrong.error) and wrong.position == 5
    assert right.error is None and right.position == 20


def test_a_constraint_that_allows_nothing_the_model_writes_ends_its_own_text() -> None:
    class Nothing(Certain):
        def allowed(self, state: int) -> np.ndarray:
            return np.zeros(VOCABULARY.size, dtype=bool) if state == 5 else super().allowed(state)

    engine = Engine(TARGET)
    wrong, right = (engine.submit(request(0, each, "greedy")) for each in (Nothing(), Certain()))
    end(engine, wrong, right)
    assert "allows none of the tokens" in str(wrong.error) and wrong.position == 5
    assert right.error is None and right.position == 20


def test_a_constraint_that_asks_is_asked_beside_the_loop() -> None:
    threads = set[int]()

    class Asking(Certain):
        """Has to be asked before the mask after every third token."""

        def __init__(self) -> None:
            super().__init__()
            self.answered = set[int]()

        def question(self, state: int) -> Callable[[], object] | None:
            def answer() -> None:
                threads.add(get_ident())
                self.answered.add(state)

            return answer if state % 3 == 0 and state not in self.answered else None

        def allowed(self, state: int) -> np.ndarray:
            assert state % 3 or state in self.answered
            return super().allowed(state)

    engine = Engine(TARGET)
    asking, plain = (engine.submit(request(4, each, "sampled")) for each in (Asking(), Certain()))
    end(engine, asking, plain)
    assert asking.tokens == plain.tokens and asking.error is None
    assert threads and get_ident() not in threads


def test_texts_share_passes_with_others() -> None:
    requests = [request(number, compiled("words"), "sampled") for number in range(4)]
    expected = [outcome(seq) for seq in written(Counted(TARGET), requests)]
    engine = Engine(TARGET)
    policy = engine.submit(request(8, None, "sampled", cache_policy="streaming-llm", max_new_tokens=60, eos_ids=()))
    seqs = [engine.submit(each) for each in requests]
    held = 0
    while not all(seq.finished for seq in seqs):
        engine.step()
        held += len(engine._arrays) == 4 and not policy.finished
    assert held > 10 and [outcome(seq) for seq in seqs] == expected


@pytest.mark.parametrize("drafter", [Auto(warm=None), PromptLookup(max_ngram=1)], ids=["auto", "copies"])
def test_forced_tokens_are_drafted_for_all_texts_together(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come true, and the other drafter learns that it has not guessed them."""
    learn, told, guesses = ForcedBatch.learn, list[tuple[int, int]](), 0

    def learned(batch: ForcedBatch, steps: StepArrays, ended: Any) -> dict[int, Exception]:
        nonlocal guesses
        drafts, before = batch._drafts, steps.accepted.copy()
        own, sizes = drafts.learn, steps.sizes[[*batch._guessed]] - 1

        def seen(steps: StepArrays, ended: Any) -> dict[int, Exception]:
            nonlocal guesses
            told.extend(zip(steps.accepted[[*batch._guessed]].tolist(), sizes.tolist(), strict=True))
            assert (steps.accepted[[*batch._guessed]] <= [*batch._guessed.values()]).all()
            guesses += int(np.delete(steps.accepted, [*batch._guessed])[: len(batch.places)].sum())
            return own(steps, ended)

        monkeypatch.setattr(drafts, "learn", seen)
        found = learn(batch, steps, ended)
        monkeypatch.setattr(drafts, "learn", own)
        assert (steps.accepted == before).all()
        return found

    monkeypatch.setattr(ForcedBatch, "learn", learned)
    engine = Engine(TARGET, pass_seconds=lambda context: 1.0 + 0.001 * np.arange(1024))
    forcing = JSONSchema({"const": {"name": "abc", "age": 12, "na": [True, True, True, "ab"]}}, "compact")
    constraints = [forcing.compile(VOCABULARY), compiled("words"), compiled("list")]
    seqs = [engine.submit(request(number, each, "sampled", drafter=drafter)) for number, each in enumerate(constraints)]
    end(engine, *seqs)
    assert sum(size for _, size in told) > 5 and sum(came for came, _ in told) < 3, "forced tokens count as guesses"
    assert seqs[0].trace.passes < 6 and guesses > 0
    alone = [request(number, each, "sampled") for number, each in enumerate(constraints)]
    assert [seq.tokens for seq in seqs] == [seq.tokens for seq in written(Counted(TARGET), alone)]


def test_a_batch_that_rests_is_not_asked_for_what_constraints_restrict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that it skips are few calls; forced tokens are drafted in them, too."""
    forced, rests, asked = ForcedBatch.propose, list[int](), list[bool]()

    def counted(batch: ForcedBatch, arrays: StepArrays, budget: JointBudget) -> int:
        propose = batch._drafts.propose

        def own(arrays: StepArrays, budget: JointBudget) -> int:
            asked[-1] = True
            return propose(arrays, budget)

        rests.append(batch._drafts.rests)
        asked.append(False)
        with monkeypatch.context() as patch:
            patch.setattr(batch._drafts, "propose", own)
            return forced(batch, arrays, budget)

    monkeypatch.setattr(ForcedBatch, "propose", counted)
    requests = [request(number, compiled("words"), "sampled", max_new_tokens=60) for number in range(4)]
    expected = [seq.tokens for seq in written(Counted(TARGET), requests)]
    # What passes take is not known of a new model, and drafts wait until it is.
    engine = Engine(to_int8(tiny_transformer(0, vocab_size=VOCABULARY.size)))
    seqs = [engine.submit(replace(each, drafter=Auto(warm=None))) for each in requests]
    end(engine, *seqs)
    assert [seq.tokens for seq in seqs] == expected
    assert rests[1:3] == [4, 3] and asked == [not each for each in rests]


def test_a_step_under_constraints_is_few_calls() -> None:
    """Each constrained text gets calls for its state and its mask; texts beside it get none."""

    def calls(constrained: int, free: int, drafter: Drafter | None = None) -> float:
        engine, found = Engine(TARGET, pass_seconds=lambda context: 1.0 + np.arange(1024)), 0
        own = {"drafter": drafter, "max_new_tokens": 40}
        seqs = [engine.submit(request(number, compiled("words"), "greedy", **own)) for number in range(constrained)]
        seqs += [engine.submit(request(number, None, "greedy", eos_ids=())) for number in range(free)]
        while any(seq.position < 4 for seq in seqs):
            engine.step()

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            for _ in range(8):
                engine.step()
        finally:
            sys.setprofile(None)
        return found / 8

    assert calls(1, 0) <= 140
    assert calls(1, 31) <= calls(1, 0) + 2
    assert calls(32, 0) <= 32 * 55 + 100
    assert calls(32, 0, Auto(warm=None)) <= 32 * 110 + 300
