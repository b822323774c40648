"""Draft models on another device than the target: texts are those of one device, and nothing mixes the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.drafters import adviser_lookup
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.deer import Deer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.eagle_3 import EAGLE3Head
from decodery.speculative.drafters.easyspec import EasySpec
from decodery.speculative.drafters.hierarchical import Hierarchical
from decodery.speculative.drafters.nested import Nested
from decodery.speculative.drafters.ngram import NGram
from decodery.speculative.drafters.pearl import Pearl
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.parts import Parts
from decodery.step import forward_request as ask
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.testing import decode, tiny_transformer
from far import Devices, Far, moved
from methods import blocked

TARGET, DRAFT = tiny_transformer(0, num_layers=3), tiny_transformer(0, num_layers=2)
MADE: dict[str, Callable[[Any], Drafter]] = {
    "pearl": lambda model: Pearl(model, length=3),
    "draft-model": lambda model: DraftModel(model, length=3),
    "draft-model, tree": lambda model: DraftModel(model, tree_policy="specinfer:expansion=2/1"),
    "easyspec": lambda model: EasySpec(model, length=3, layers=2),
    "hierarchical": lambda model: Hierarchical(DraftModel(model), NGram(length=2, scope="request"), length=3),
    "nested": lambda model: Nested(model, exits=(1, 2), sure=(0.1,), length=3),
    "deer": lambda model: Deer(blocked(model), length=3, reuse=True),
}
# The target's device and the draft's.
APART = [("pearl", "cpu", "meta:0"), ("pearl", "meta:0", "cpu"), *((name, "meta:0", "meta:1") for name in MADE)]


@pytest.mark.parametrize(("name", "target", "draft"), APART)
def test_texts_are_those_of_one_device(name: str, target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tensors of a second device are made is said thread by thread: all is done in one.
    monkeypatch.setattr(ask, "side_by_side", lambda main, beside, waits: (main(), beside()))
    for settings in (
        {"acceptance_rule": "coupled"},
        {"acceptance_rule": "coupled", "sampler": Sampler.from_settings(temperature=0.8, top_p=0.9)},
        {"acceptance_rule": "recursive-rejection", "sampler": Sampler.from_settings(temperature=0.8, top_k=20)},
    ):
        asked: dict[str, Any] = {"max_new_tokens": 6, **settings}
        (here,) = decode(TARGET, [[1, 2, 3]], drafter=MADE[name](DRAFT), **asked)
        with Devices():
            (far,) = decode(Far(TARGET, target), [[1, 2, 3]], drafter=MADE[name](Far(DRAFT, draft)), **asked)
        assert far.tokens == here.tokens and far.trace.passes == here.trace.passes


@pytest.mark.parametrize("place", ["found", "shipped"])
def test_auto_looks_for_a_head_wherever_its_model_is(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks it there, in int8 as files hold heads."""
    tensors, settings = EAGLE3Head.untrained(TARGET, 0)
    head = TrainedHead("eagle-3", Parts(tensors).quantized(), settings)
    monkeypatch.setattr(adviser_lookup, "chosen_head", lambda model: (head, []))
    monkeypatch.setattr(adviser_lookup.drafts, "shipped_head", lambda kind, vocabulary: Path("head"))
    monkeypatch.setattr(TrainedHead, "load", lambda path: head)

    def written(model: Any) -> tuple[list[int], float, list[int]]:
        loop = Engine(model, memory=Memory(), pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))
        seq = loop.submit(Request([1, 2, 3], max_new_tokens=16, drafter=Auto(warm=None, head=place)))
        costs = seq.states[seq.request.drafter].advice.costs
        costs.share = 0.001
        loop.run([seq])
        return seq.generated, costs.taken, [step.nodes for step in seq.trace.steps]

    here = written(TARGET)
    with Devices():
        assert written(Transformer(TARGET.config, moved(TARGET.weights, "meta:0"))) == here
    assert here[1] > 0


def test_tensors_of_two_devices_do_not_mix() -> None:
    with Devices():
        one, other = (torch.arange(3.0, device=device) for device in ("meta:0", "meta:1"))
        assert (one + one).tolist() == [0.0, 2.0, 4.0] and (one + other.to(one.device)).device == one.device
        for wrong in (lambda: one + other, lambda: one + torch.ones(3)):
            with pytest.raises(RuntimeError, match="on one device"):
                wrong()
        with pytest.raises(TypeError, match="to numpy"):
            one.numpy()
