"""Groups: how texts are cut into them, what is learned of them, and that a run goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.logits_sources.hamburger import Hamburger
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Weights
from decodery.models.trained.micro_steps import MicroSteps
from decodery.testing import decode, tiny_transformer
from decodery.training.corpus import Corpus, TrainingText
from decodery.training.data import write_texts
from decodery.training.hamburger import (
    MODEL,
    GroupBatch,
    HamburgerRecipe,
    entropies,
    groups,
    losses,
    train_hamburger,
    untrained,
)
from decodery.training.kind import Run
from tiny_models import VOCAB, make_tokenizer

RECIPE = HamburgerRecipe(most=3, layers=1, epochs=2.0, batch=6, lr=3e-3, base_lr=1e-3)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """Sure of itself here and there, its embedding and its head one table."""
    made = tiny_transformer(3, vocab_size=VOCAB, dtype=torch.float32)
    table = made.weights.embedding * 4
    weights = Weights(table, made.weights.layers, made.weights.norm, Dense(table))
    model = Transformer(replace(made.config, tie_embeddings=True), weights)
    return LoadedModel(model, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    asked = [[number % 50 + 1, 7, 9, number % 13, 4] for number in range(40)]
    return write_texts(target, asked, tmp_path_factory.mktemp("written") / "text", max_new_tokens=12, top=20)


def test_a_token_joins_where_the_model_was_sure() -> None:
    assert groups(np.array([2.0, 0.01, 0.5, 0.01, 0.01, 1.0, 0.04]), 4) == [4, 1, 2]
    assert groups(np.array([2.0, 0.7, 0.2, 0.1]), 4) == [1, 3]
    assert groups(np.array([0.2, 0.07]), 4) == groups(np.array([0.06, 0.05]), 4) == [1, 1]
    random = np.random.default_rng(0)
    for _ in range(20):
        entropy, own = random.exponential(0.3, 30), list[list[float]]()
        for nats in entropy.tolist():
            if own and len(own[-1]) < 3 and (nats < 0.05 or nats < 0.3 * max(own[-1])):
                own[-1].append(nats)
            else:
                own.append([nats])
        assert groups(entropy, 3) == [len(each) for each in own]


def test_entropies_are_those_of_the_most_likely_tokens_and_of_all_others() -> None:
    p = np.array([[0.6, 0.3, 0.05], [0.5, 0.25, 0.25]])
    logprobs = np.full((5, 3), -np.inf, dtype=np.float16)
    logprobs[3:] = np.log(np.stack([p[1], p[0]])).astype(np.float16)
    text = TrainingText(np.arange(5, dtype=np.int32), 3, np.zeros((5, 3), np.int32), logprobs)
    # Of the first written token nothing is known; the second follows the one at place 3.
    assert entropies(text) == pytest.approx([0.0, -(p[1] * np.log(p[1])).sum()], abs=5e-3)
    whole = np.append(p[0], 0.05)
    text = TrainingText(
        np.arange(6, dtype=np.int32), 3, np.zeros((6, 3), np.int32), np.vstack([logprobs, logprobs[:1]])
    )
    assert entropies(text)[2] == pytest.approx(-(whole * np.log(whole)).sum(), abs=5e-3)


def test_everything_learns_and_what_is_said_is_weighed_as_the_model_found_it(target: LoadedModel) -> None:
    model = target.model
    assert isinstance(model, Transformer)
    parts, n = untrained(model, RECIPE), 12
    # What begins at zero has no gradient below it before the first step.
    for name in ("merge.weight", "stop.2.weight"):
        parts.tensors[name].add_(0.1)
    likely = np.tile(np.array([4, 9], dtype=np.int32), (n, 1))
    logprobs = np.log(np.tile(np.array([0.3, 0.1]), (n, 1))).astype(np.float16)
    training_batch = GroupBatch.of([TrainingText(np.arange(n, dtype=np.int32), 3, likely, logprobs)], [[1, 3, 2, 3]], 3)
    for each in parts.tensors.values():
        each.requires_grad_(True)
    spoken, stops, logits = losses(model, parts, training_batch)
    law = logits.log_softmax(dim=-1)
    assert torch.allclose(spoken, -(0.75 * law[:, 4] + 0.25 * law[:, 9]), atol=1e-3)
    assert training_batch.ends.tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 1] and len(stops) == 9
    (spoken.mean() + 0.5 * stops.mean()).backward()
    silent = [name for name, each in parts.tensors.items() if each.grad is None or not each.grad.abs().sum()]
    # Softmax sees no shift of all keys; rounding leaves some of it.
    assert set(silent) <= {"key.bias"}


@pytest.mark.integration
def test_training_goes_on_where_it_stopped(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    before = target.model.weights.embedding.clone()  # type: ignore[attr-defined]
    whole = train_hamburger(Run(target, tmp_path / "whole", (RECIPE,)), corpus)
    found = whole.facts["validation"]
    assert found["loss"] < 0.9 * found["baselines"]["before"]["loss"] and found["tokens of a group"] > 1.05

    def stop(what: str, done: int, total: int) -> None:
        if what == "learning groups" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_hamburger(Run(target, tmp_path / "twice", (RECIPE,), progress=stop), corpus)
    assert not (tmp_path / "twice" / MicroSteps.FILE).exists()
    again = train_hamburger(Run(target, tmp_path / "twice", (RECIPE,)), corpus)
    assert all(torch.equal(again.tensors[name], each) for name, each in whole.tensors.items())
    # A copy has learned; the model has not.
    assert torch.equal(target.model.weights.embedding, before)  # type: ignore[attr-defined]
    tuned = load(str(tmp_path / "whole" / MODEL)).model
    assert tuned.fingerprint == whole.model != target.model.fingerprint
    (plain,), (alone,) = (
        decode(tuned, [[1, 7, 9]], logits_source=source, max_new_tokens=8)
        for source in (None, Hamburger(str(tmp_path / "whole"), confidence=2.0))
    )
    assert plain.generated == alone.generated
    with pytest.raises(SettingsError, match="was trained for another model"):
        decode(target.model, [[1]], logits_source=Hamburger(str(tmp_path / "whole")))
    with pytest.raises(SettingsError, match="other settings"):
        train_hamburger(Run(target, tmp_path / "twice", (HamburgerRecipe(most=2),)), corpus)


def test_what_cannot_learn_is_refused(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    apart = LoadedModel(tiny_transformer(0, vocab_size=VOCAB), target.tokenizer, None, "apart", "float64")
    with pytest.raises(UnsupportedModel, match="--base-lr 0"):
        train_hamburger(Run(apart, tmp_path / "apart", (RECIPE,)), corpus)
    with pytest.raises(UnsupportedModel, match="no small decoder"):
        train_hamburger(Run(target, tmp_path / "deep", (HamburgerRecipe(layers=3),)), corpus)
    unsure = write_texts(target, [[1, 2]] * 20, tmp_path / "unsure", max_new_tokens=4)
    with pytest.raises(SettingsError, match="what it found likely"):
        train_hamburger(Run(target, tmp_path / "out", (RECIPE,)), unsure)
    for wrong in ({"most": 1}, {"layers": 0}, {"epochs": 0.0}, {"lr": 0.0}, {"base_lr": -1.0}):
        with pytest.raises(SettingsError, match="give one in"):
            HamburgerRecipe(**wrong)  # type: ignore[arg-type]


def test_the_command_makes_what_the_source_reads(target: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("decodery.models.loaders.load.load", lambda name, **options: target)
    (tmp_path / "prompts.txt").write_text("one and two\nthree and four\n")
    given = ["--prompts", str(tmp_path / "prompts.txt"), "--texts", "20", "--max-new-tokens", "12", "--base-lr", "0"]
    command = ["train", "hamburger", "--out", str(tmp_path / "out"), *given, "--layers", "1", "--epochs", "1"]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = MicroSteps.load(tmp_path / "out" / MicroSteps.FILE)
    assert found.model == target.model.fingerprint and "--logits-source hamburger:micro=" in done.output
    assert not (tmp_path / "out" / MODEL).exists()
