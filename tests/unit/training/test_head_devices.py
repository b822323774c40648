"""Heads are trained on the device of their target: nothing mixes two devices, and they learn what they learn here."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covering import some
from decodery.core.registry import methods
from decodery.models.loaders.load import LoadedModel
from decodery.models.torch.transformer import Transformer
from decodery.speculative.heads.drafter import TrainedDrafter, head_kind
from decodery.speculative.heads.head import TrainedHead
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.head import HeadRecipe, train_head
from decodery.training.kind import Run
from far import Devices, FarTensor
from tiny_models import tiny_loaded

KINDS = sorted(each.name for each in methods("drafter") if issubclass(each.cls, TrainedDrafter))
RECIPE = HeadRecipe(outputs=80, epochs=0.2, batch=4, length=16)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[256, 65 + number % 26] for number in range(60)]
    return write_texts(target, prompts, tmp_path_factory.mktemp("text"), max_new_tokens=10, temperatures=(0.7,))


def far(value: Any) -> Any:
    """Weights that lie on another device."""
    if isinstance(value, torch.Tensor):
        return FarTensor(value, torch.device("meta:0"))
    if isinstance(value, list):
        return [far(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: far(getattr(value, each.name)) for each in fields(value)})
    return value


def leaves(report: Any, name: str = "") -> dict[str, Any]:
    """What a report says, by the names that lead there."""
    if isinstance(report, dict):
        inner = [(f"{name}/{key}", value) for key, value in report.items()]
    elif isinstance(report, list):
        inner = [(f"{name}/{place}", value) for place, value in enumerate(report)]
    else:
        return {name: report}
    return {place: each for path, value in inner for place, each in leaves(value, path).items()}


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_what_is_learned_on_a_device_is_what_is_learned_here(
    kind: str, target: LoadedModel, corpus: Corpus, tmp_path: Path
) -> None:
    here = train_head(Run(target, tmp_path / "here", (RECIPE,)), head_kind(kind), corpus)
    model = target.model
    assert isinstance(model, Transformer)
    with Devices():
        there = replace(target, model=Transformer(model.config, far(model.weights)))
        found = train_head(Run(there, tmp_path / "there", (RECIPE,)), head_kind(kind), corpus)
    assert leaves(found) == pytest.approx(leaves(here), abs=1e-4)
    # The file is that of the processor: it says nothing of the device.
    made = [TrainedHead.load(tmp_path / where) for where in ("here", "there")]
    assert made[0].tensors.keys() == made[1].tensors.keys() and made[0].model == made[1].model
    assert all(each.device.type == "cpu" for each in made[1].tensors.values())
