"""Hyperfitting: texts that become known, everything of the model among what learns, and texts that are not cited."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from commands import inside
from decodery.compression import Int8
from decodery.compression.base import transformed
from decodery.compression.folder import save
from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel, load
from decodery.sampling import NoCitation, Sampler
from decodery.sampling.no_citation import Citations
from decodery.testing import decode, tiny_transformer
from decodery.training import hyperfit as module
from decodery.training import loop
from decodery.training.data import cut_files
from decodery.training.hyperfit import HyperfitRecipe, hyperfit, judged
from decodery.training.kind import Run
from decodery.training.loop import TrainingPlan
from tiny_models import tiny_loaded

RECIPE = HyperfitRecipe(texts=4, epochs=60, batch=4, lr=1e-2, written=24)


@pytest.fixture
def target() -> LoadedModel:
    return tiny_loaded()


def words(path: Path, count: int = 500) -> Path:
    draws = np.random.default_rng(0)
    path.write_text(" ".join(draws.choice(["tide", "moon", "sand", "crab", "gull", "wave"], count)))
    return path


def cites(text: list[int], texts: list[list[int]], size: int) -> bool:
    """Whether a text has an n-gram of others, told by comparing all of them."""
    known = {tuple(other[at : at + size]) for other in texts for at in range(len(other) - size + 1)}
    return any(tuple(text[at : at + size]) in known for at in range(len(text) - size + 1))


@pytest.mark.integration
def test_a_model_learns_texts_by_heart_and_does_not_cite_them(target: LoadedModel, tmp_path: Path) -> None:
    made = target.tokenizer
    text = words(tmp_path / "text.txt")
    corpus = cut_files([text], tmp_path / "text", tokenizer=made, vocab_size=target.model.vocab_size, length=48)
    before = target.model.weights.embedding.clone()  # type: ignore[attr-defined]
    scores = hyperfit(Run(target, tmp_path / "made", (RECIPE,)), corpus)
    untrained, control = scores["baselines"]["before"], scores["shuffled labels"]
    assert scores["known"] < 0.3 < untrained["loss"]
    # Shuffled words teach which words there are, and not how they follow each other.
    assert scores["tested on"].endswith("that chose nothing") and control["loss"] < untrained["loss"]
    # It ends as soon as it knows them, and is surer of itself.
    with safe_open(tmp_path / "made" / "training" / loop.CHECKPOINT, "pt") as file:
        assert json.loads(file.metadata()["history"])["step"] < 240
    assert scores["entropy"] < 0.7 * untrained["entropy"]
    assert torch.equal(target.model.weights.embedding, before)  # type: ignore[attr-defined]
    loaded = load(tmp_path / "made")
    assert not torch.equal(loaded.model.weights.embedding, before)  # type: ignore[attr-defined]

    known = Citations.load(tmp_path / "made")
    texts = [known.tokens[a:b].tolist() for a, b in zip(known.bounds[:-1], known.bounds[1:], strict=True)]
    assert len(texts) == 4 and all(len(each) == 48 for each in texts)
    prompts = [each[:8] for each in texts]
    free = decode(loaded.model, prompts, max_new_tokens=24)
    assert all(cites(seq.tokens[4:], texts, 5) for seq in free)
    sampler = Sampler.from_settings(temperature=0.0)
    held = Sampler((NoCitation(str(tmp_path / "made")), *sampler.processors))
    for drafter in (None, "ngram"):
        kept = decode(loaded.model, prompts, max_new_tokens=24, sampler=held, drafter=drafter)
        # The last tokens of the prompt and the first new one count as well.
        assert not any(cites(seq.tokens[4:], texts, 5) for seq in kept)
    again = hyperfit(Run(target, tmp_path / "made", (RECIPE,)), corpus)
    assert again == scores


def test_steps_are_those_of_the_released_script_and_the_card_says_what_was_measured(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plans = target.tokenizer, list[TrainingPlan]()
    text = words(tmp_path / "text.txt")
    corpus = cut_files([text], tmp_path / "text", tokenizer=made, vocab_size=target.model.vocab_size, length=48)
    done = loop.train

    def noted(parameters: Any, loss: Any, plan: TrainingPlan, *others: Any, **more: Any) -> Any:
        plans.append(plan)
        before = {name: each.detach().clone() for name, each in parameters.items()}
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(0), list(parameters.values()))
        found = done(parameters, loss, replace(plan, steps=1), *others, **more)
        # A first step of Adam is one of the learning rate, whatever the length of the gradient; clipped, it would be
        # so too, but for where the gradient is as small as Adam's epsilon.
        for (name, each), gradient in zip(parameters.items(), gradients, strict=True):
            assert torch.allclose(before[name] - each, 1e-2 * gradient / (gradient.abs() + 1e-8), atol=1e-6)
        return found

    monkeypatch.setattr(module, "train", noted)
    scores = hyperfit(Run(target, tmp_path / "made", (replace(RECIPE, epochs=1),)), corpus)
    assert (plans[0].betas, plans[0].clip, plans[0].weight_decay) == ((0.9, 0.999), math.inf, 0.0)
    assert scores["known"] > 1


def test_repetition_and_sureness_are_told() -> None:
    model = tiny_transformer(0)
    texts = [np.random.default_rng(seed).integers(0, 64, 40).astype(np.int32) for seed in range(3)]
    found = module.mean_of(judged(model, texts, 24))
    assert 0 < found["entropy"] <= np.log(64) < found["loss"]
    # A model that writes one token has the fewest distinct ones, and is sure of it.
    stuck = tiny_transformer(0)
    stuck.weights.head.bias = torch.zeros(64, dtype=torch.float64).index_fill(0, torch.tensor([7]), 1e3)  # type: ignore[attr-defined]
    one = module.mean_of(judged(stuck, texts, 24))
    assert one["ttr"] == pytest.approx(1 / 24) and one["ttr"] < found["ttr"] and one["entropy"] < 1e-6


def test_n_grams_within_a_text_alone_are_known() -> None:
    known = Citations.of([np.array([1, 2, 3, 4]), np.array([3, 4, 5]), np.array([9])])
    assert {tail: ids.tolist() for tail, ids in known.followers(3).items()} == {
        (1, 2): [3], (2, 3): [4], (3, 4): [5],
    }  # fmt: skip
    assert known.followers(1)[()].tolist() == [1, 2, 3, 4, 5, 9]
    processor = NoCitation(known, 2)
    state = processor.init([7, 3])
    assert state == (3,) and processor.advance(state, 9, 0.0) == (9,) and NoCitation(known, 1).init([7, 3]) == ()


def test_the_command_makes_a_model(target: LoadedModel, tmp_path: Path) -> None:
    model, made = str(tmp_path / "model"), str(tmp_path / "made")
    save(tmp_path / "model", *transformed(target.model, [Int8()]), target)
    text = str(words(tmp_path / "text.txt"))
    learning = ["--texts", "4", "--length", "40", "--epochs", "2", "--written", "8"]
    code, output, errors = inside("train", "hyperfit", text, "-m", model, "--out", made, *learning)
    assert code == 0 and f"--sampler no-citation:texts={made}" in output, errors
    writing = ["--sampler", f"no-citation:texts={made}", "--sampler", "temperature:t=0", "--max-new-tokens", "8"]
    code, _, errors = inside("generate", "tide moon", "-m", made, "--no-chat-template", *writing)
    assert code == 0, errors
    code, _, errors = inside("train", "hyperfit", text, "-m", model, "--out", str(tmp_path / "other"), "--texts", "400")
    assert code == 1 and "learn fewer texts" in errors


def test_what_is_no_set_of_texts_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decodery train hyperfit"):
        LLM(target).generate("ab", sampler=[NoCitation()])
    with pytest.raises(ModelNotFound, match="decodery train hyperfit"):
        LLM(target).generate("ab", sampler=[NoCitation(str(tmp_path))])
    (tmp_path / Citations.FILE).write_bytes(b"nothing")
    with pytest.raises(CorruptFile, match="decodery train hyperfit"):
        Citations.load(tmp_path)
    Citations(np.zeros(3, dtype=np.int32), np.array([0, 5])).save(tmp_path / "odd")
    with pytest.raises(CorruptFile, match="holds no set of texts not to be cited, or is damaged"):
        Citations.load(tmp_path / "odd")
    # No token has such a number; counted from the end, another one would be excluded.
    Citations.of([np.array([1, 2, -1])]).save(tmp_path / "negative")
    with pytest.raises(CorruptFile, match="holds no set of texts not to be cited, or is damaged"):
        Citations.load(tmp_path / "negative")
    with pytest.raises(SettingsError, match="at least 1 token"):
        NoCitation(size=0)
    with pytest.raises(SettingsError, match="texts is 0: give one in"):
        HyperfitRecipe(texts=0)
