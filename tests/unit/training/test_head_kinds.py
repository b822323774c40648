"""Training draft heads of every kind: what comes out drafts, and has learned something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covering import some
from decodery.core.registry import methods, resolve
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import silent
from decodery.speculative.heads.drafter import TrainedDrafter, head_kind
from decodery.speculative.heads.head import TrainedHead
from decodery.testing import check_identical
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.features import FeatureStore
from decodery.training.head import HeadRecipe, _HeadTraining, _StoredTexts, train_head
from tiny_models import tiny_loaded

KINDS = [
    *("chimera", "clover", "dflash", "dspark", "eagle", "falcon", "fspad", "hydra", "kangaroo", "longspec", "mtp"),
    "p-eagle",
]
"""Those that `test_head` leaves out; msd is taught beside what it is for."""


def test_no_kind_is_left_out() -> None:
    heads = {each.name for each in methods("drafter") if issubclass(each.cls, TrainedDrafter)}
    assert heads == {*KINDS, "medusa", "eagle-3", "msd"}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[256, 65 + number % 26] for number in range(80)]
    return write_texts(
        target, prompts, tmp_path_factory.mktemp("corpus") / "text", max_new_tokens=20, temperatures=(0.7,), top=8
    )


RECIPE = HeadRecipe(outputs=80, epochs=0.5, lr=3e-3, batch=4, length=16)


@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_a_head_learns(kind: str, target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    model, made = target.model, head_kind(kind)
    tensors, settings = made.untrained(model, seed=0)
    head = made(TrainedHead(kind, tensors, settings), model)
    learned, held = corpus.split()
    features = FeatureStore(model, corpus, head.taps, tmp_path, 8, silent)
    training_run = _HeadTraining(head, _StoredTexts(features, learned, held), None, RECIPE, 45)
    optimizer = torch.optim.Adam(training_run.parameters.values(), lr=3e-3)
    before = training_run.validate()["cross_entropy"]
    for step in range(45):
        optimizer.zero_grad()
        training_run.loss(step).backward()
        optimizer.step()
    assert training_run.validate()["cross_entropy"] < before - 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_drafts(kind: str, target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    scores = train_head(target, head_kind(kind), corpus, tmp_path, recipe=RECIPE)
    trained = TrainedHead.load(tmp_path)
    assert trained.kind == kind and trained.model == target.model.fingerprint
    assert trained.facts["cross_entropy"] == scores["cross_entropy"]
    drafter = resolve("drafter", f"{kind}:head={tmp_path}")
    check_identical(target.model, [[256, 70, 71]], drafter=drafter, max_new_tokens=12, seeds=(0,), tested="drafted")
