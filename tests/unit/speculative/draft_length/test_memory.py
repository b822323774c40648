"""A bound in bytes that is never exceeded, counted by the tensors themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covering import FULL
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.cache.page_pool import SLOTS
from decodery.speculative.draft_length.memory import MemoryBound, held
from decodery.speculative.drafters.p_eagle import PEAGLE, PEAGLEHead
from decodery.speculative.heads.head import TrainedHead
from decodery.step.draft_length_policy import MOST_NODES
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer
from decodery.testing.tensors import TensorBytes
from methods import DRAFTERS, RULES, SAMPLERS, fits

VOCAB = 500
TARGET = tiny_transformer(0, vocab_size=VOCAB)
OTHER = tiny_transformer(0, vocab_size=VOCAB, num_layers=1)
PAIRS = [
    (drafter, rule)
    for drafter in ("auto:model", "draft-model", "graft", "rasd", "rapid", "token-recycling", "prompt-lookup")
    for rule in RULES
    if fits(DRAFTERS[drafter](OTHER), RULES[rule])
]


def counted(tensor: torch.Tensor) -> bool:
    """Rows over the vocabulary."""
    return tensor.ndim > 0 and tensor.shape[-1] == VOCAB


def run(request: Request, count=counted) -> tuple[Sequence, int]:
    """The text, and the most bytes of tensors that count and of pages."""
    pool = TARGET.new_cache().pages.pool
    before, pages = pool.used, 0
    with TensorBytes(count) as bytes_:
        engine = Engine(TARGET, pass_seconds=lambda length: np.ones(1024))
        seq = engine.submit(request)
        while not seq.finished:
            engine.step()
            pages = max(pages, pool.used - before)
    return seq, bytes_.peak + pages * pool.page_bytes


@pytest.mark.integration
def test_tensor_bytes_are_those_alive() -> None:
    weight = torch.zeros(10, 10)
    with TensorBytes() as bytes_:
        first = weight + 1
        weight.T.add_(1)
        view = first[2:].T
        assert bytes_.now == 400
        second = torch.cat((first, first))
        assert bytes_.now == 1200
        del first
        assert bytes_.now == 1200, "the view keeps it"
        del view
        assert (bytes_.now, bytes_.peak, second.shape) == (800, 1200, (20, 10))


@settings(max_examples=30 if FULL else 10, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    length=st.integers(1, 20),
    share=st.floats(0.0, 1.1),
)
@example(pair=("graft", "coupled"), sampler="everything", prompt=[0], length=4, share=0.03125)
@example(pair=("rasd", "coupled"), sampler="everything", prompt=[0], length=4, share=0.03125)
def test_no_text_ever_holds_more_than_its_budget(pair, sampler, prompt, length, share) -> None:
    drafter, rule = DRAFTERS[pair[0]](OTHER), RULES[pair[1]]

    def request(mib: float) -> Request:
        return Request(
            prompt,
            max_new_tokens=length,
            drafter=drafter,
            acceptance_rule=rule,
            sampler=SAMPLERS[sampler],
            draft_length=MemoryBound(mib),
        )

    seq = Engine(TARGET).submit(request(100.0))
    allowed = int(held(seq, 0) + share * (held(seq, MOST_NODES) - held(seq, 0)) + 1)
    seq, peak = run(request(allowed / 2**20 * (1 + 1e-9)))
    assert peak <= seq.states[seq.request.draft_length].bytes <= allowed + 1
    assert seq.cache.capacity in (0, -(-seq.states[seq.request.draft_length].slots // SLOTS) * SLOTS)


@pytest.mark.parametrize("rule", RULES)
def test_the_plan_is_near_what_is_held(rule: str) -> None:
    # 64 drafted tokens, so that what grows with the draft outweighs the allowance for choosing.
    drafter = DRAFTERS["draft-model"](TARGET)
    request = Request(
        [1, 2, 3],
        max_new_tokens=70,
        drafter=drafter,
        acceptance_rule=RULES[rule],
        draft_length=MemoryBound(50.0),
        max_draft_tokens=64,
    )
    object.__setattr__(drafter, "length", 64)
    seq, peak = run(request)
    assert 0.8 * seq.states[seq.request.draft_length].bytes < peak <= seq.states[seq.request.draft_length].bytes


def test_without_a_budget_more_is_held() -> None:
    # The control: the same text, bounded to eight nodes' worth, and not bounded.
    drafter = DRAFTERS["draft-model"](TARGET)
    object.__setattr__(drafter, "length", 64)
    plain = Request([1, 2, 3], max_new_tokens=70, drafter=drafter)
    seq = Engine(TARGET).submit(Request([1, 2, 3], max_new_tokens=70, drafter=drafter, draft_length=MemoryBound(50.0)))
    mib = held(seq, 8) / 2**20
    bounded = Request([1, 2, 3], max_new_tokens=70, drafter=drafter, draft_length=MemoryBound(mib * (1 + 1e-9)))
    (free, peak), (held_back, small) = run(plain), run(bounded)
    assert small <= mib * 2**20 < peak
    assert held_back.generated == free.generated
    assert max(step.nodes for step in held_back.trace.decoding) == 8


def test_turns_of_a_chat_keep_to_the_same_bound() -> None:
    engine, tokens, earlier = Engine(TARGET, pass_seconds=lambda length: np.ones(1024)), [1, 2, 3], None
    for _ in range(6):
        request = Request(
            tokens,
            max_new_tokens=8,
            drafter=DRAFTERS["draft-model"](OTHER),
            draft_length=MemoryBound(1.0),
            reuse=earlier,
        )
        engine.run([earlier := engine.submit(request)])
        slots = len(tokens) + 8 + earlier.states[earlier.request.draft_length].nodes
        room = -(-slots // SLOTS) * SLOTS
        assert earlier.cache.capacity == earlier.states[earlier.request.drafter].cache.capacity == room
        tokens = [*earlier.tokens, 4, 5]


def test_a_text_that_cannot_fit_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"memory allows 0.01 MiB, and a text of up to 103 tokens takes .* without"):
        run(Request([1, 2, 3], max_new_tokens=100, draft_length=MemoryBound(0.01)))


def test_what_a_head_predicts_at_once_is_counted() -> None:
    target = tiny_transformer(0, vocab_size=VOCAB, dtype=torch.float32)
    tensors, shape = PEAGLEHead.untrained(target, 0)
    held_of = {}
    for heads in (2, 64):
        drafter = PEAGLE(TrainedHead("p-eagle", tensors, {**shape, "heads": heads}), length=4)
        with TensorBytes(counted) as bytes_:
            engine = Engine(target)
            seq = engine.submit(Request([1, 2, 3], max_new_tokens=12, drafter=drafter, draft_length=MemoryBound(50.0)))
            engine.run([seq])
        held_of[heads] = seq.states[seq.request.draft_length].bytes
        assert bytes_.peak <= held_of[heads]
    assert held_of[64] - held_of[2] == 62 * VOCAB * 4
