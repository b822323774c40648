"""Token routers: the search for schedules, what routers learn, and that a run goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.trained.token_routers import TokenRouters, uniform
from decodery.testing import tiny_transformer
from decodery.training.corpus import Corpus, TrainingText
from decodery.training.data import write_texts
from decodery.training.ftp import Expected, FTPRecipe, router_loss, said, train_ftp, train_routers
from decodery.training.kind import Run
from decodery.training.schedules import Evolution, evolve, fitted
from tiny_models import VOCAB, make_tokenizer

RECIPE = FTPRecipe(0.3, width=8, evolution=Evolution(5, 2), read=2, length=12, steps=4, lr=1e-2, sinks=1)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    model = tiny_transformer(3, vocab_size=VOCAB, num_layers=5, dtype=torch.float32)
    return LoadedModel(model, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")


@pytest.fixture(scope="module")
def written(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    asked = [[number % 50 + 1, 7, 9, number % 13, 4, 8, number % 7] for number in range(20)]
    return write_texts(target, asked, tmp_path_factory.mktemp("written") / "text", max_new_tokens=12)


def test_every_schedule_has_the_mean_and_the_best_is_found() -> None:
    tried: list[tuple[float, ...]] = []
    wanted = np.array([0.0, 0.9, 0.0, 0.9, 0.0, 0.3, 0.0, 0.0])

    def loss(schedule: tuple[float, ...]) -> float:
        tried.append(schedule)
        return float(np.abs(np.array(schedule) - wanted).sum())

    evolution = Evolution(16, 15)
    best, losses = evolve(loss, 8, 0.2625, evolution, seed=0)
    assert len(tried) == evolution.tried and tried[0] == pytest.approx(uniform(8, 0.2625))
    for schedule in tried:
        assert sum(schedule) / 8 == pytest.approx(0.2625) and schedule[0] == schedule[-1] == 0.0
        assert min(schedule) > -1e-12 and max(schedule) < 1 + 1e-12
    assert loss(best) == min(losses)
    # Breeding finds what as many random schedules do not.
    random = np.random.default_rng(1)
    drawn = [(0.0, *fitted(random.dirichlet(np.ones(6)) * 2.1, 2.1), 0.0) for _ in range(evolution.tried)]
    assert min(losses) < 0.7 * min(map(loss, drawn))


def test_the_divergence_is_that_of_the_most_likely_tokens_and_of_all_others(target: LoadedModel) -> None:
    tokens = np.arange(1, 11)
    expected = Expected.of(target.model, TrainingText(tokens, 3))
    laws = [
        target.model.forward(Batch([Segment.chunk(each, target.model.new_cache())])).logits[2:].double().softmax(dim=-1)
        for each in (tokens, tokens + 20)
    ]
    total = 0.0
    for row in range(8):
        best = laws[0][row].topk(64).indices
        pairs = [[*law[row][best].tolist(), 1 - float(law[row][best].sum())] for law in laws]
        total += sum(p * np.log(p / q) for p, q in zip(*pairs, strict=True))
    assert float(expected.divergence(laws[1].log())) == pytest.approx(total / 8, rel=1e-4)
    assert float(expected.divergence(laws[0].log())) == pytest.approx(0.0, abs=1e-6)


def test_routers_learn_the_share_that_is_asked_for_and_the_model_stays(target: LoadedModel, tmp_path: Path) -> None:
    routers = TokenRouters.initial(uniform(5, 0.3), 8, seed=4)
    before = {name: each.clone() for name, each in routers.weights.items()}
    embedding = target.model.weights.embedding.clone()
    texts = [TrainingText(np.random.default_rng(seed).integers(0, VOCAB, 20), 16) for seed in range(6)]
    recipe = FTPRecipe(0.3, width=8, steps=20, lr=3e-2, sinks=1)
    history = train_routers(target.model, routers, texts[:4], texts[4:], tmp_path, recipe)
    assert history.best is not None and history.best < 0.8 * history.metrics["0"]["loss"]
    assert history.metrics[str(history.best_step)]["gap"] < 0.05
    assert any(not torch.equal(routers.weights[name], each) for name, each in before.items())
    assert torch.equal(target.model.weights.embedding, embedding)


def test_gradients_reach_routers_through_what_was_decided(target: LoadedModel) -> None:
    routers = TokenRouters.initial(uniform(5, 0.3), 8, seed=4)
    for each in routers.weights.values():
        each.requires_grad_(True)
    expected = Expected.of(target.model, TrainingText(np.arange(1, 20), 15))
    recipe = FTPRecipe(0.3, guide=0.0, rate=0.0, sinks=1)
    router_loss(target.model, routers, expected, recipe, 1.0).backward()
    gradient = routers.weights["out.weight"].grad
    assert gradient is not None and gradient[1:4].abs().amax(dim=(1, 2)).min() > 0 == gradient[[0, 4]].abs().max()
    assert said(target.model, torch.zeros(2, 32)).shape == (2, VOCAB)


@pytest.mark.integration
def test_training_goes_on_where_it_stopped(target: LoadedModel, written: Corpus, tmp_path: Path) -> None:
    whole = train_ftp(Run(target, tmp_path / "whole", (RECIPE,)), written)
    assert whole.sparsity == pytest.approx(0.3) and whole.model == target.model.fingerprint
    found = whole.facts["validation"]
    assert set(found["baselines"]) == {"static, uniform", "static, scheduled", "as many tokens at random"}
    low, high = found["interval of divergence"]
    assert low <= found["divergence"] <= high and found["shuffled labels"]["sparsity"] > 0

    def stop(what: str, done: int, total: int) -> None:
        if what == "training routers" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_ftp(Run(target, tmp_path / "twice", (RECIPE,), progress=stop), written)
    assert not (tmp_path / "twice" / TokenRouters.FILE).exists()
    again = train_ftp(Run(target, tmp_path / "twice", (RECIPE,)), written)
    assert again.schedule == whole.schedule
    assert all(torch.equal(again.weights[name], each) for name, each in whole.weights.items())
    with pytest.raises(SettingsError, match="other settings"):
        train_ftp(Run(target, tmp_path / "twice", (FTPRecipe(0.2),)), written)


def test_the_command_makes_what_the_source_reads(target: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("decodery.models.loaders.load.load", lambda name, **options: target)
    (tmp_path / "prompts.txt").write_text("one and two\nthree and four\n")
    given = ["--prompts", str(tmp_path / "prompts.txt"), "--texts", "20", "--max-new-tokens", "6", "--sparsity", "0.2"]
    small = ["--population", "4", "--generations", "1", "--read", "1", "--length", "12", "--steps", "2"]
    command = ["train", "ftp", "--out", str(tmp_path / "out"), *given, *small]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = TokenRouters.load(tmp_path / "out" / TokenRouters.FILE)
    assert found.sparsity == pytest.approx(0.2) and found.weights and "--logits-source ftp:routers=" in done.output
