"""Training a draft: which tokens and units it keeps, what it learns, how it is kept and refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError, VocabularyMismatch
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.loaders import fused
from decodery.models.loaders.drafts import DESCRIPTION, SHIPPED, WEIGHTS
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.torch.transformer import Transformer
from decodery.sampling.min_new_tokens import MinNewTokens
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.nested import Nested
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import run_sync
from decodery.testing import check_batch, check_identical, check_state
from decodery.training.cut import DraftShape, cut_draft, keep_tokens, quantized
from decodery.training.data import Corpus, TrainingText, write_texts
from decodery.training.draft import train_draft
from decodery.training.held_out import HeldOut
from decodery.training.loop import TrainingPlan, rounded
from decodery.training.training_batch import distance, judged, predictions, training_batch
from tiny_models import VOCAB, tiny_loaded

SHAPE = DraftShape(layers=1, inner=48, tokens=80, window=16)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[256, 65 + number % 26] for number in range(100)]
    out = tmp_path_factory.mktemp("corpus") / "text"
    return write_texts(target, prompts, out, max_new_tokens=24, temperatures=(0.7,), top=8)


@pytest.fixture(scope="module")
def trained(target: LoadedModel, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("draft") / "draft"
    return out, train_draft(
        target, corpus, out, shape=SHAPE, plan=TrainingPlan(120, lr=3e-3, validate_every=20), batch=8
    )


def test_the_tokens_that_are_written_keep_their_row(target: LoadedModel) -> None:
    texts = [TrainingText(np.array([9, 9, 200, 200, 30], np.int32), 2), TrainingText(np.array([7, 200], np.int32), 1)]
    kept = keep_tokens(texts, 3, target.model, always=[257])
    # Prompts do not count: 200 was written three times, 30 once, 257 ends a text.
    assert kept.ids.tolist() == [30, 200, 257]
    table = target.model.weights.embedding
    for token in (3, 30, 111):
        similar = torch.cosine_similarity(table[token][None], table[kept.ids])
        assert kept.rows[token] == similar.argmax()
    assert kept.rows[kept.ids].tolist() == [0, 1, 2]


def test_a_cut_of_everything_is_the_target(target: LoadedModel) -> None:
    model = target.model
    config = model.config
    kept = keep_tokens([], VOCAB, model)
    tied = Transformer(config, replace(model.weights, head=fused.Dense(model.weights.embedding)))
    whole = cut_draft(model, DraftShape(config.num_layers, config.intermediate_size, VOCAB, 400), kept)
    ids = np.arange(5, 25)
    for a, b in zip(_logits(whole, ids), _logits(tied, ids), strict=True):
        assert (a - b).abs().max() < 1e-5


def _logits(model: Transformer, ids: np.ndarray) -> list[torch.Tensor]:
    alone = model.forward(Batch([Segment(np.arange(len(ids)), ids)])).logits
    cache, rows = model.new_cache(), []
    for chunk in (ids[:7], ids[7:8], ids[8:]):
        rows.append(model.forward(Batch([Segment.chunk(chunk, cache)])).logits)
        cache.keep(range(len(chunk)))
    return [alone, torch.cat(rows)]


def test_a_batch_is_what_the_target_said(target: LoadedModel, corpus: Corpus) -> None:
    model = target.model
    kept = keep_tokens(corpus, 100, model, model.config.eos_ids)
    place = np.full(VOCAB, -1)
    place[kept.ids] = np.arange(len(kept.ids))
    text = corpus[4]
    taught = training_batch([text, corpus[5]], kept, place)
    law = model.forward(Batch([Segment(np.arange(len(text.tokens)), text.tokens.astype(np.int64))])).logits.softmax(-1)
    rows = np.arange(text.written - 1, len(text.tokens) - 1)
    assert taught.rows[: len(rows)].tolist() == rows.tolist()
    for row, share, outputs, weight in zip(rows, taught.share, taught.likely, taught.weight, strict=False):
        if row == text.written - 1:
            # The target was not asked there: what it wrote is all there is.
            assert kept.ids[outputs[0]] == text.tokens[row + 1] and share.tolist() == [1.0] + [0.0] * 7
            continue
        best = law[row].topk(8)
        known = np.isin(best.indices.numpy(), kept.ids.numpy())
        assert weight == pytest.approx(float(best.values[known].sum()), abs=2e-3)
        assert torch.allclose(share[known] * weight, best.values[known], atol=2e-3)
        assert (share[~known] == 0).all()
    # The rest fills up and counts for nothing.
    assert taught.batch.rows == len(taught.rows) == 128
    assert taught.count == sum(len(each.tokens) - each.written for each in (text, corpus[5]))
    assert (taught.weight[taught.count :] == 0).all()


def test_gradients_are_those_of_the_distance(target: LoadedModel, corpus: Corpus) -> None:
    model = cut_draft(target.model, SHAPE, keep_tokens(corpus, 80, target.model))
    place = np.full(VOCAB, -1)
    place[model.weights.kept.ids] = np.arange(80)
    taught = training_batch([corpus[0]], model.weights.kept, place)
    gate = model.weights.layers[0].gate_up.weight.requires_grad_(True)
    distance(predictions(model, taught), taught).backward()
    # The largest one stands out most from what float32 leaves of differences.
    row, column = divmod(int(gate.grad.abs().argmax()), gate.shape[1])
    step = torch.zeros_like(gate)
    step[row, column] = 1e-2
    with torch.no_grad():
        gate += step
        above = distance(predictions(model, taught), taught)
        gate -= 2 * step
        below = distance(predictions(model, taught), taught)
    assert float((above - below) / 2e-2) == pytest.approx(float(gate.grad[row, column]), rel=0.05, abs=1e-5)


def test_training_helps_and_the_folder_is_a_draft(
    target: LoadedModel, corpus: Corpus, trained: tuple[Path, dict]
) -> None:
    out, scores = trained
    kept = keep_tokens([corpus[n] for n in corpus.split()[0]], 80, target.model, (257,))
    place = np.full(VOCAB, -1)
    place[kept.ids] = np.arange(80)
    held = HeldOut.of([corpus[n] for n in corpus.split()[1]])
    taught = training_batch(held.tested, kept, place)
    before = judged(cut_draft(target.model, SHAPE, kept), taught)
    assert scores["cross_entropy"] < 0.8 * before["cross_entropy"]
    assert scores["acceptance"] > 1.5 * before["acceptance"]
    loaded = load(out)
    assert loaded.dtype == "int8" and rounded(judged(loaded.model, taught)).items() <= scores.items()
    assert loaded.tokenizer.fingerprint() == target.tokenizer.fingerprint()
    # Tokens without an output are never predicted, and every row is a law over the others.
    logits = _logits(loaded.model, np.arange(5, 25))[0]
    assert logits.shape == (20, VOCAB) and torch.isfinite(logits).sum(dim=1).tolist() == [80] * 20


def test_the_same_seed_makes_the_same_draft_interrupted_or_not(
    target: LoadedModel, corpus: Corpus, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 45:
            raise KeyboardInterrupt

    plan = TrainingPlan(120, lr=3e-3, validate_every=20, save_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        train_draft(target, corpus, tmp_path / "draft", shape=SHAPE, plan=plan, batch=8, progress=stop)
    assert not (tmp_path / "draft" / DESCRIPTION).exists()
    train_draft(target, corpus, tmp_path / "draft", shape=SHAPE, plan=plan, batch=8)
    assert (tmp_path / "draft" / WEIGHTS).read_bytes() == (trained[0] / WEIGHTS).read_bytes()


@pytest.mark.integration
def test_a_draft_of_few_tokens_keeps_the_laws(target: LoadedModel, trained: tuple[Path, dict]) -> None:
    draft = load(trained[0]).model
    prompts = [[256, 70, 71], [256, 80]]
    check_identical(target.model, prompts, drafter=DraftModel(draft))
    check_identical(target.model, prompts, drafter=DraftModel(draft), sampler=Sampler.from_settings(temperature=0.8))
    check_identical(target.model, prompts, drafter=DraftModel(draft), acceptance_rule=Rejection())
    check_batch(target.model, prompts, drafter=DraftModel(draft))
    check_state(target.model, prompts[:1], drafter=DraftModel(draft), tolerance=1e-4)


def test_a_mask_may_leave_the_draft_nothing_to_say(target: LoadedModel, trained: tuple[Path, dict]) -> None:
    draft = load(trained[0]).model
    silenced = Sampler([MinNewTokens(100, tuple(draft.weights.kept.ids.tolist()))])
    for rule in (Coupled(), Rejection()):
        engine = Engine(target.model)
        seq = engine.submit(
            Request([256, 70], max_new_tokens=5, sampler=silenced, acceptance_rule=rule, drafter=DraftModel(draft))
        )
        engine.run([seq])
        assert len(seq.generated) == 5 and not set(seq.generated) & set(draft.weights.kept.ids.tolist())
    drafter = seq.request.drafter
    assert isinstance(drafter, DraftModel)
    law = run_sync(drafter.expand(seq, DraftTree.root(seq.last_token), [0]))
    assert law.exp().sum() == pytest.approx(1.0)


def test_what_does_not_fit_is_refused(
    target: LoadedModel, corpus: Corpus, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    out = trained[0]
    with pytest.raises(SettingsError, match="cannot be larger"):
        train_draft(target, corpus, out, shape=DraftShape(layers=3, inner=48, tokens=80))
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SettingsError, match="name a new folder"):
        train_draft(target, corpus, tmp_path, shape=SHAPE)
    with pytest.raises(SettingsError, match="in int8 alone"):
        load(out, dtype="float32")
    draft = load(out).model
    other = Transformer(replace(target.model.config, vocabulary="another"), target.model.weights)
    with pytest.raises(VocabularyMismatch, match="although there may be as many"):
        Engine(other).submit(Request([1], drafter=DraftModel(draft)))
    with pytest.raises(SettingsError, match="no draft model comes with"):
        Engine(other).submit(Request([1], drafter=DraftModel()))


@pytest.mark.parametrize("change", [{"kept_tokens": 79}, {"hidden_size": 64}, {"vocab_size": 289}, {"num_layers": 2}])
def test_weights_of_another_shape_are_refused(change: dict, trained: tuple[Path, dict]) -> None:
    config = load(trained[0]).model.config
    with pytest.raises(CorruptFile, match="do not fit"):
        fused.read(trained[0] / WEIGHTS, replace(config, **change), torch.device("cpu"))


def test_quantizing_changes_little(target: LoadedModel, corpus: Corpus) -> None:
    draft = cut_draft(target.model, SHAPE, keep_tokens(corpus, 80, target.model))
    ids = np.arange(5, 25)
    exact, rounded = _logits(draft, ids)[0], _logits(quantized(draft), ids)[0]
    known = torch.isfinite(exact)
    assert (exact - rounded)[known].norm() < 0.05 * exact[known].norm()


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 10**9},
        {"num_heads": 0},
        {"head_dim": 7},
        {"sliding_layers": [True, False]},
        {"kept_tokens": -1},
        {"x": 1},
    ],
)
def test_a_damaged_description_is_refused(change: dict, trained: tuple[Path, dict], tmp_path: Path) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "draft", ignore=shutil.ignore_patterns("training"))
    description = json.loads((folder / DESCRIPTION).read_text())
    description["config"] |= change
    (folder / DESCRIPTION).write_text(json.dumps(description))
    with pytest.raises(CorruptFile, match=r"model\.json: config: .* remove the folder"):
        load(folder)


def test_the_shipped_draft_is_that_of_the_embedded_model(smollm2_int8) -> None:
    out = smollm2_int8.generate("Name three fruits.", max_new_tokens=24, drafter=DraftModel())
    assert out.tokens == smollm2_int8.generate("Name three fruits.", max_new_tokens=24, drafter=None).tokens
    assert out.trace.tokens_per_pass > 1
    draft = load("smollm2-draft")
    assert draft.tokenizer.fingerprint() == smollm2_int8.tokenizer.fingerprint() == draft.model.config.vocabulary
    assert all(path.stat().st_size <= 8_000_000 for path in SHIPPED["smollm2-draft"].iterdir())


def test_exits_learn_together_and_serve_as_drafts(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    shape, plan = replace(SHAPE, layers=2, exits=(1, 2)), TrainingPlan(24, lr=3e-3, validate_every=12)
    scores = train_draft(target, corpus, tmp_path / "nested", shape=shape, plan=plan, batch=4)
    assert scores["agreement"] == scores["agreement 2"] and scores["acceptance 1"] > 0
    found = load(tmp_path / "nested").model
    assert found.config.exits == (1, 2)
    # The loss is the mean of what the first layer and both would lose as drafts of their own.
    kept = keep_tokens(corpus, 80, target.model)
    draft, place = cut_draft(target.model, shape, kept), np.full(VOCAB, -1)
    place[kept.ids] = np.arange(80)
    taught = training_batch([corpus[0], corpus[1]], kept, place)
    weights = draft.weights
    alone = [
        Transformer(
            replace(draft.config, num_layers=n, sliding_layers=(True,) * n, exits=()),
            replace(weights, layers=weights.layers[:n]),
        )
        for n in shape.exits
    ]
    each = [float(distance(predictions(one, taught), taught)) for one in alone]
    assert float(distance(predictions(draft, taught), taught)) == pytest.approx(sum(each) / 2, rel=1e-5)
    assert judged(draft, taught)["agreement 1"] == judged(alone[0], taught)["agreement"]
    drafter = Nested(str(tmp_path / "nested"), sure=(0.3,))
    check_identical(target.model, [[256, 70]], drafter=drafter, seeds=(0,), max_new_tokens=12, tested="drafted")
    for exits in ((2, 1), (1,), (0, 2)):
        with pytest.raises(SettingsError, match="exits ascend"):
            replace(SHAPE, layers=2, exits=exits)
