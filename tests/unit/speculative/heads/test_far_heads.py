"""Heads of a model on another device draft there, and draft what they draft on the processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from decodery.core.topk import most_likely
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Scores
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.drafters.hydra import HydraHead
from decodery.speculative.drafters.kangaroo import Kangaroo
from decodery.speculative.heads import reading
from decodery.speculative.heads.drafter import HeadDrafter, TrainedDrafter
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.head_pass import HeadPass
from decodery.step.drafter import Drafter
from decodery.testing import tiny_transformer
from far import Devices, Watched, moved
from methods import DRAFTERS

TARGET = tiny_transformer(0, num_layers=4)
KINDS = [name for name, make in DRAFTERS.items() if isinstance(make(TARGET), HeadDrafter | Kangaroo)]
NUCLEUS = Sampler.from_settings(temperature=0.8, top_p=0.9)


def shaken(name: str) -> TrainedDrafter:
    """A drafter whose head has numbers of its own everywhere, zeros included, so that each of its parts counts.

    Levels that all said the same would give paths of equal chances, whose order is one of rounding.
    """
    drafter = DRAFTERS[name](TARGET)
    assert isinstance(drafter, TrainedDrafter) and drafter.trained is not None
    own = drafter.trained
    tensors = {
        part: each + (0.02 * torch.arange(1, each.numel() + 1).double().sin()).view_as(each).to(each)
        if each.is_floating_point()
        else each
        for part, each in own.tensors.items()
    }
    return replace(drafter, head=TrainedHead(own.kind, tensors, own.settings))


def texts(model: Any, drafter: Drafter) -> list[tuple[list[int], int, int, int]]:
    engine = Engine(model)
    asked = [
        engine.submit(Request(prompt, sampler=NUCLEUS, seed=seed, drafter=drafter, max_new_tokens=10))
        for seed, prompt in enumerate(([1, 2, 3], [4, 5, 6, 7, 8, 4, 5]))
    ]
    engine.run(asked)
    return [
        (
            text.generated,
            text.trace.passes,
            sum(s.nodes for s in text.trace.steps),
            sum(s.accepted for s in text.trace.steps),
        )
        for text in asked
    ]


@pytest.mark.parametrize("name", KINDS)
def test_heads_draft_where_their_model_is(name: str) -> None:
    drafter = shaken(name)
    here = texts(TARGET, drafter)
    with Devices():
        there = Transformer(TARGET.config, moved(TARGET.weights, "meta:0"))
        assert texts(there, drafter) == here
    assert sum(nodes for _, _, nodes, _ in here) > 10


def test_a_pass_over_several_texts_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is most likely after all of its rows comes by one copy."""
    passes, waits, alone, real = list[int](), list[int](), list[int](), HeadPass.forward

    def forward(self: HeadPass, batch: Batch, **settings: Any) -> Scores:
        before = watched.waits.total()
        scores = real(self, batch, **settings)
        passes.append(len(batch.segments))
        waits.append(watched.waits.total() - before)
        return scores

    def by_itself(logits: torch.Tensor, k: int) -> Any:
        alone.append(k)
        return most_likely(logits, k)

    monkeypatch.setattr(HeadPass, "forward", forward)
    monkeypatch.setattr(reading, "most_likely", by_itself)
    drafter = shaken("falcon")
    with Watched() as watched:
        engine = Engine(Transformer(TARGET.config, moved(TARGET.weights, "meta:0")))
        asked = [
            engine.submit(Request(prompt, seed=seed, drafter=drafter, max_new_tokens=24))
            for seed, prompt in enumerate(([1, 2, 3], [4, 5, 6, 7], [8, 4, 5]))
        ]
        # In the first step that drafts, a text does not know yet of those that come after it.
        while not all(any(step.nodes for step in text.trace.steps) for text in asked):
            engine.step()
        for each in (passes, waits, alone):
            each.clear()
        while not any(text.finished for text in asked):
            engine.step()
    assert len(waits) > 4 and set(waits) == {1} and sum(passes) > 2 * len(passes) and not alone


def test_a_text_that_a_head_cannot_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that read one text after another have read those before it, and read them no second time."""
    drafter, real, reads = shaken("hydra"), HydraHead.read, list[int]()

    def written(*prompts: list[int]) -> list[Any]:
        engine = Engine(TARGET)
        asked = [engine.submit(Request(each, drafter=drafter, max_new_tokens=8)) for each in prompts]
        while not all(each.finished for each in asked):
            engine.step()
        return asked

    def read(head: Any, memory: Any, states: Any, tokens: torch.Tensor, positions: Any) -> torch.Tensor:
        if positions[0] == 0:
            reads.append(len(tokens))
        if len(tokens) == 6:
            raise ValueError("this text cannot be read")
        return real(head, memory, states, tokens, positions)

    expected = [each.generated for each in written([1, 2, 3], [4, 5])]
    monkeypatch.setattr(HydraHead, "read", read)
    first, broken, last = written([1, 2, 3], [9, 8, 7, 6, 5, 4], [4, 5])
    assert [first.generated, last.generated] == expected
    assert "cannot be read" in str(broken.error) and reads.count(3) == reads.count(2) == 1
