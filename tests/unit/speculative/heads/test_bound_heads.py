"""Heads beside their targets: how long a target lives that a head was bound to."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.dflash import DFlash, DFlashHead
from decodery.speculative.drafters.eagle_3 import EAGLE3, EAGLE3Head
from decodery.speculative.heads.head import BoundHead, TrainedHead
from decodery.step.drafter import Drafter
from decodery.testing import tiny_transformer


def untrained(kind: type[BoundHead], model: object) -> TrainedHead:
    tensors, settings = kind.untrained(model, 0)  # type: ignore[arg-type]
    return TrainedHead(kind.kind, tensors, settings)


MADE = {
    "eagle-3": lambda model: EAGLE3(untrained(EAGLE3Head, model)),
    "dflash": lambda model: DFlash(untrained(DFlashHead, model)),
    "auto": lambda model: Auto(head=untrained(EAGLE3Head, model), warm=None),
}


@pytest.mark.parametrize("name", MADE)
def test_a_target_goes_with_its_texts_and_not_with_its_head(name: str) -> None:
    model = tiny_transformer(0, num_layers=4)
    drafter: Drafter = MADE[name](model)
    engine = Engine(model)
    texts = [engine.submit(Request([1, 2, 3], max_new_tokens=8, drafter=drafter)) for _ in range(2)]
    engine.run(texts)
    alive = ref(model)
    del model, engine, texts
    gc.collect()
    assert alive() is None and drafter is not None
