"""Training a block drafter: what a block sees and is taught in either stage, and that the folder is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.sampling import Sampler
from decodery.speculative.drafters.deer import BlockReading, Deer
from decodery.testing import check_identical, tiny_transformer
from decodery.training.corpus import Corpus, TrainingText, claim, shard_path, write_shard
from decodery.training.cut import DraftShape, cut_draft, keep_tokens
from decodery.training.data import write_texts
from decodery.training.deer import (
    DeerRecipe,
    MaskedBlock,
    blocks_after,
    continuation,
    drawn,
    suffix,
    train_deer,
    with_mask,
)
from decodery.training.held_out import HeldOut, Measured
from decodery.training.kind import Run
from tiny_models import tiny_loaded

TEXT = TrainingText(np.array([5, 6, 7, 8, 9, 10, 11, 12], np.int32), 2)


def test_stages_hide_and_weigh_what_they_should() -> None:
    random, hidden = np.random.default_rng(0), np.zeros(5)
    for _ in range(200):
        block = continuation(3, 5, random)
        assert block.hidden[-1] and block.weight[block.hidden].sum() == pytest.approx(1.0)
        assert not block.weight[~block.hidden].any()
        hidden += block.hidden
    # Of the first four, every number from one to all of them as often.
    assert np.abs(hidden[:4] / 200 - 0.625).max() < 0.1
    last = suffix(3, 4, 1.5)
    assert last.hidden.all() and last.weight.tolist() == [1.5**3, 1.5**2, 1.5, 1.0]
    assert suffix(3, 4, 1.0).weight.tolist() == [1.0] * 4
    recipe = DeerRecipe(block=4, places=50)
    for stage in (1, 2):
        found = drawn(TEXT, recipe, stage, random)
        assert [block.place for block in found] == [1, 2, 3, 4, 5]
        assert all(2 <= len(block.hidden) <= min(4, 7 - block.place) for block in found)
    assert not drawn(TrainingText(TEXT.tokens[:2], 2), recipe, 1, random)


def test_blocks_of_a_batch_are_those_that_will_be_drafted() -> None:
    """What a row says among many blocks of a text is what a drafter is told, which reads one after what it holds."""
    model = tiny_transformer(0, vocab_size=64)
    blocks = [suffix(2, 3, 1.0), MaskedBlock(4, np.array([False, True, True]), np.array([0.0, 0.5, 0.5]))]
    part = blocks_after(TEXT, blocks, 40)
    assert part.segment.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 40, 40, 41, 10, 40, 41]
    assert part.segment.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 5, 6, 7]
    assert part.rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11] and part.after.tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
        3,
        4,
        5,
        6,
    ]
    assert part.weight[6:].tolist() == pytest.approx([4 / 3, 4 / 3, 2 / 3, 2 / 3])
    said = model.forward(Batch([part.segment])).logits
    reading = BlockReading(model, 40, 3)
    asking = reading.block(TEXT.tokens[:3].tolist(), 3)
    (ask,) = next(asking)
    alone = model.forward(Batch([ask.segment])).logits
    assert torch.allclose(said[[2, 7, 8]], alone, atol=1e-11)
    whole = model.forward(Batch([Segment(np.arange(7), TEXT.tokens[:7].astype(np.int64))])).logits
    assert torch.allclose(said[:7], whole, atol=1e-11)
    # A token of the block that is known changes what the others say.
    unknown = model.forward(Batch([blocks_after(TEXT, [suffix(4, 3, 1.0)], 40).segment]))
    assert not torch.allclose(said[11], unknown.logits[8])


def test_one_command_makes_a_drafter_that_learns_and_goes_on(tmp_path: Path) -> None:
    target = tiny_loaded()
    prompts = [[256, 65 + number % 26] for number in range(60)]
    corpus: Corpus = write_texts(target, prompts, tmp_path / "text", max_new_tokens=12, temperatures=(0.7,), top=8)
    shape = DraftShape(1, 48, 80, 16)
    recipe = DeerRecipe(4, places=4, epochs=2, refining=1, batch=4, lr=3e-3)
    found = train_deer(Run(target, tmp_path / "deer", (recipe,)), corpus, shape=shape)
    assert train_deer(Run(target, tmp_path / "deer", (recipe,)), corpus, shape=shape) == found
    assert found["cross_entropy"] < found["baselines"]["untrained"]["cross_entropy"]
    config = load(tmp_path / "deer").model.config
    assert (config.mask_id, config.block_length, config.vocab_size) == (288, 4, 290) and config.causal
    drafter, hot = Deer(str(tmp_path / "deer")), Sampler.from_settings(temperature=1.0)
    (run,) = check_identical(
        target.model, [[256, 66, 70]], drafter=drafter, sampler=hot, seeds=(0,), max_new_tokens=12, tested="drafted"
    )
    assert max(step.nodes for step in run.trace.steps) == 4
    with pytest.raises(SettingsError, match="other settings"):
        train_deer(Run(target, tmp_path / "deer", (DeerRecipe(4, places=3, batch=8),)), corpus, shape=shape)
    with pytest.raises(SettingsError, match="block is 1: give one in"):
        DeerRecipe(block=1)
    with pytest.raises(SettingsError, match="too few texts"):
        train_deer(Run(target, tmp_path / "other", (DeerRecipe(30),)), corpus, shape=shape)


def test_the_interval_of_a_drafter_is_of_the_figure_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, found = np.random.default_rng(0), list[Measured]()
    claim(tmp_path / "text", {}, 288)
    texts = [
        TrainingText(np.array([number, 9, *random.integers(65, 68, size)], np.int32), 2)
        for number, size in enumerate(random.integers(6, 28, 200))
    ]
    write_shard(shard_path(tmp_path / "text", 0), texts, 0)
    measured = HeldOut.measured
    monkeypatch.setattr(HeldOut, "measured", lambda *given: found.append(measured(*given)) or found[-1])
    recipe = DeerRecipe(4, places=4, epochs=1, refining=0, batch=8, lr=3e-3)
    train_deer(Run(tiny_loaded(), tmp_path / "deer", (recipe,)), Corpus(tmp_path / "text"), DraftShape(1, 48, 80, 16))
    last = found[-1]
    assert len(found) == 2 and len(last.each) == 5
    assert np.average(last.each, weights=last.weights) == pytest.approx(last["accepted"])
    assert np.mean(last.each) != pytest.approx(last["accepted"], abs=1e-3)


def test_the_two_tokens_that_are_no_text_stand_behind_all_others() -> None:
    target = tiny_transformer(0, dtype=torch.float32)
    kept = keep_tokens([TEXT], 20, target)
    draft = with_mask(cut_draft(target, DraftShape(1, 32, 20, 8), kept), 4)
    weights = draft.weights
    assert weights.kept is not None and weights.kept.ids[-2:].tolist() == [64, 65] and len(weights.embedding) == 22
    assert torch.equal(draft.embed_tokens(torch.tensor([64, 65])), weights.embedding[20:])
    assert torch.allclose(weights.embedding[20], weights.embedding[:20].mean(dim=0))
