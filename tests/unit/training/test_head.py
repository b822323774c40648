"""Training a draft head: it comes to expect what the target says next, and its card says by how much.

Each kind's own learning is a matter of `test_head_kinds`; here is one that reads no token and reaches as far as it has
parts, and one that goes on from its own output.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.models.loaders.load import LoadedModel
from decodery.speculative.heads.drafter import head_kind
from decodery.speculative.heads.head import TrainedHead
from decodery.testing import tiny_transformer
from decodery.training.corpus import Corpus, TrainingText, claim, shard_path, write_shard
from decodery.training.data import write_texts
from decodery.training.head import HeadRecipe, _begun, train_head
from decodery.training.held_out import HeldOut, Measured
from decodery.training.kind import Run
from tiny_models import tiny_loaded

KINDS = ["medusa", "eagle-3"]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return replace(tiny_loaded(), model=tiny_transformer(3, vocab_size=16, dtype=torch.float32))


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[number % 16, number // 16] for number in range(128)]
    return write_texts(target, prompts, tmp_path_factory.mktemp("text"), max_new_tokens=20, temperatures=(1.0,))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_held_out_is_guessed_better_after_training(
    name: str, target: LoadedModel, corpus: Corpus, tmp_path: Path
) -> None:
    recipe = HeadRecipe(outputs=0, epochs=4.0, lr=1e-2, batch=8, length=20)
    scores = train_head(Run(target, tmp_path, (recipe,)), head_kind(name), corpus)
    trained = TrainedHead.load(tmp_path)
    depths = range(1, 1 + min(5, trained.settings.get("heads", 5)))
    before, after = ([each[f"agreement.{at}"] for at in depths] for each in (scores["baselines"]["untrained"], scores))
    assert after[0] > before[0] + 0.03 and sum(after) > sum(before)
    # The first rank's rates are these, and no later rank is right where an earlier one was.
    rates = trained.facts["rates"]
    assert [ranks[0] for ranks in rates] == pytest.approx(after, abs=1e-3)
    assert all(0.5 < sum(ranks) <= 1.0001 for ranks in rates)


def test_the_interval_of_a_head_is_of_the_figure_that_is_printed(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, found = np.random.default_rng(0), list[Measured]()
    claim(tmp_path / "text", {}, 16)
    texts = [
        TrainingText(np.array([number // 16, number % 16, *random.integers(0, 16, size)], np.int32), 2)
        for number, size in enumerate(random.integers(2, 38, 200))
    ]
    write_shard(shard_path(tmp_path / "text", 0), texts, 0)
    measured = HeldOut.measured
    monkeypatch.setattr(HeldOut, "measured", lambda *given: found.append(measured(*given)) or found[-1])
    train_head(
        Run(target, tmp_path, (HeadRecipe(outputs=0, epochs=0.1),)), head_kind("medusa"), Corpus(tmp_path / "text")
    )
    assert len(found) == 2 and all(len(each.each) == 5 for each in found)
    for each in found:
        assert np.average(each.each, weights=each.weights) == pytest.approx(each["agreement.1"])
        assert np.mean(each.each) != pytest.approx(each["agreement.1"], abs=1e-3)


def test_what_is_held_out_is_of_every_temperature(corpus: Corpus) -> None:
    """Texts take temperatures in turns; one of every twenty, always the last of them, would be of one alone."""
    learned, held = corpus.split()
    assert sorted([*learned, *held]) == list(range(len(corpus))) and len(held) == len(corpus) // 20
    for temperatures in (2, 4, 5):
        assert len({number % temperatures for number in held}) == temperatures
        assert len({number % temperatures for number in range(19, len(corpus), 20)}) < temperatures


@pytest.mark.integration
def test_a_training_begins_with_an_earlier_head(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    kind, recipe = head_kind("eagle-3"), HeadRecipe(outputs=0, epochs=4.0, lr=1e-2, batch=8, length=20)
    first = train_head(Run(target, tmp_path / "first", (recipe,)), kind, corpus)
    start = TrainedHead.load(tmp_path / "first")
    # It learns in tensors of its own: those of the earlier head stay as they are.
    begun = _begun(start, kind).tensors
    assert not any(begun[name].data_ptr() == each.data_ptr() for name, each in start.tensors.items() if name in begun)
    # At a rate that changes nothing, what comes out is what went in: its int8 layers, read and written once more.
    still = replace(recipe, epochs=0.1, lr=1e-9)
    again = train_head(Run(target, tmp_path / "again", (still,)), kind, corpus, start=start)
    assert again["agreement.1"] == pytest.approx(first["agreement.1"], abs=0.01)
    found = TrainedHead.load(tmp_path / "again")
    for name, tensor in start.tensors.items():
        assert torch.allclose(
            found.tensors[name].float(), tensor.float(), atol=1.01 if tensor.dtype == torch.int8 else 1e-4
        )
    with pytest.raises(SettingsError, match="the head to begin with is for eagle-3, not for medusa"):
        train_head(Run(target, tmp_path / "other", (still,)), head_kind("medusa"), corpus, start=start)


@pytest.mark.integration
def test_a_cut_training_leaves_the_best_head_so_far(
    target: LoadedModel, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each checkpoint; then the same call goes on and ends as one that was not cut."""
    clock = itertools.count(step=100)
    monkeypatch.setattr("decodery.training.loop.monotonic", lambda: float(next(clock)))
    recipe = HeadRecipe(outputs=0, epochs=4.0, lr=1e-2, batch=8, length=20)

    def cut(what: str, done: int, total: int) -> None:
        if what == "training" and 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_head(Run(target, tmp_path / "cut", (recipe,), progress=cut), head_kind("medusa"), corpus)
    early = TrainedHead.load(tmp_path / "cut")
    assert early.kind == "medusa" and early.facts["tokens"] > 0 and early.facts["rates"]
    ended = train_head(Run(target, tmp_path / "cut", (recipe,)), head_kind("medusa"), corpus)
    assert ended == train_head(Run(target, tmp_path / "whole", (recipe,)), head_kind("medusa"), corpus)
    assert TrainedHead.load(tmp_path / "cut").facts["steps"] >= early.facts["steps"] > 0
