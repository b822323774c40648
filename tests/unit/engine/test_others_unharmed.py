"""What one task does, or has done to its cache, is never another's: memory, faults, evictions and policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.logits_sources.guidance import Guidance
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.hooks import Intervention
from decodery.models.layer_plan import LayerPlan
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.testing.models import Counted

MODEL = to_int8(tiny_transformer(0, max_positions=2048))
PROMPT = [int(token) for token in np.random.default_rng(4).integers(0, 64, 40)]
SLOT = MODEL.new_cache().slot_bytes


class Last(AttentionPolicy):
    """Reads the last few slots only."""

    def select(self, attention: Attention) -> np.ndarray:
        slots = attention.seen.shape[-1]
        return np.broadcast_to(np.arange(slots) >= slots - 4, attention.seen.shape)


def test_a_text_that_outgrows_memory_waits_and_does_not_read_again_and_again() -> None:
    model = Counted(MODEL)
    engine = Engine(model, limits=Limits(cache_bytes=2100 * SLOT))
    old = engine.submit(Request([token % 64 for token in range(500)], max_new_tokens=60))
    for _ in range(3):
        engine.step()
    young = engine.submit(Request([token % 63 for token in range(1027)], max_new_tokens=4))
    engine.run([old, young])
    assert engine.preemptions <= 2 and young.trace.ledger.rows["model"] < 3 * 1027


class Unforgetting(PromptLookup):
    """Breaks when its text is preempted."""

    def forget(self, seq: Sequence) -> None:
        raise RuntimeError("cannot forget")


def test_a_drafter_that_breaks_when_its_text_is_preempted_ends_that_text() -> None:
    engine = Engine(MODEL)
    broken = engine.submit(Request(PROMPT, drafter=Unforgetting(), max_new_tokens=20))
    other = engine.submit(Request(PROMPT[:9], max_new_tokens=20))
    for _ in range(4):
        engine.step()
    engine.preempt(broken)
    engine.run([other])
    assert other.generated == decode(MODEL, [PROMPT[:9]], max_new_tokens=20)[0].generated
    assert isinstance(broken.error, RuntimeError)


def test_memory_behind_a_source_counts() -> None:
    limits = Limits(cache_bytes=20 * 256 * SLOT)
    engine = Engine(MODEL, limits=limits)
    texts = [engine.submit(Request(PROMPT, logits_source=Guidance(1.5, (9, 8)), max_new_tokens=8)) for _ in range(24)]
    most = 0
    while not all(text.finished for text in texts):
        engine.step()
        most = max(most, engine.held_bytes)
    assert 0 < most <= limits.cache_bytes  # type: ignore[operator]
    assert len({tuple(text.generated) for text in texts}) == 1


def evicted(seq: Sequence) -> None:
    seq.cache.evict(0, range(2, 20))


def followed(seq: Sequence) -> None:
    seq.cache.policy = Last()


@pytest.mark.parametrize("change", [evicted, followed])
def test_what_was_done_to_a_cache_goes_with_no_other_request(change: Callable[[Sequence], None]) -> None:
    expected = decode(MODEL, [[*PROMPT, 1]], max_new_tokens=10)[0].generated
    engine = Engine(MODEL, prefixes=PrefixCache(1 << 24))
    first = engine.submit(Request(PROMPT, max_new_tokens=4))
    for _ in range(2):
        engine.step()
    change(first)
    engine.run([first])
    assert engine.submit(Request([*PROMPT, 1], max_new_tokens=10)) is not None
    for settings in ({}, {"reuse": first}):
        again = engine.submit(Request([*PROMPT, 1], max_new_tokens=10, **settings))
        engine.run([again])
        assert again.generated == expected


@pytest.mark.parametrize("change", [evicted, followed])
def test_a_text_that_cannot_be_read_again_is_not_preempted(change: Callable[[Sequence], None]) -> None:
    texts = []
    for preempted in (False, True):
        engine = Engine(MODEL)
        seq = engine.submit(Request(PROMPT, max_new_tokens=12))
        for _ in range(3):
            engine.step()
        change(seq)
        if preempted:
            engine.preempt(seq)
        engine.run([seq])
        texts.append(seq.generated)
    assert texts[0] == texts[1] != decode(MODEL, [PROMPT], max_new_tokens=12)[0].generated


def test_salts_are_text() -> None:
    for cache_namespace in (None, "\ud800"):
        with pytest.raises(SettingsError, match="cache_namespace must be text"):
            Request(PROMPT, cache_namespace=cache_namespace)  # type: ignore[arg-type]


def test_rows_of_others_are_out_of_reach() -> None:
    first, second = Segment(np.arange(3), np.array([1, 2, 3])), Segment(np.arange(2), np.array([4, 5]), logit_rows=[-1])
    with pytest.raises(IndexError, match=r"logits are wanted of rows \[-1\]"):
        MODEL.forward(Batch([first, second]))
    cache = MODEL.new_cache()
    with pytest.raises(ValueError, match="cannot write to one cache"):
        Batch([Segment.chunk([1], cache), Segment.chunk([2], cache)])


def test_an_intervention_where_a_pass_was_cut_acts_once() -> None:
    twice = Intervention("resid_post.0", lambda rows, _: rows * 2)

    def segment(**given: Any) -> Segment:
        return Segment(np.arange(5), interventions=(twice,), **given)

    tokens = np.array(PROMPT[:5])
    whole = MODEL.forward(Batch([segment(tokens=tokens)])).logits
    states = MODEL.forward(Batch([segment(tokens=tokens)]), taps=(1,), layer_plan=LayerPlan((0,))).hidden[1]
    assert torch.equal(MODEL.forward(Batch([segment(states=states)]), layer_plan=LayerPlan((1,))).logits, whole)


def test_sources_of_several_contexts_refuse_interventions() -> None:
    from decodery.step.forward_request import run_sync, score

    reader = Guidance(1.5, (9, 8)).over(MODEL, PROMPT)
    segment = Segment.chunk(PROMPT, reader.new_cache())
    segment.interventions = (Intervention(1, lambda rows, _: rows),)
    with pytest.raises(UnsupportedModel, match="cannot be changed on their way"):
        run_sync(score(reader, segment))
