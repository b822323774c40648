"""The acceptance head of SpecDec++: its labels, its states, its training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.speculative.draft_length.specdec_pp import AcceptanceHead, SpecDecPP
from decodery.testing import tiny_transformer
from decodery.training import acceptance
from decodery.training.acceptance import AcceptanceRecipe, judged, train_acceptance, weighted_loss
from decodery.training.corpus import Corpus, TrainingText
from decodery.training.data import write_texts
from decodery.training.kind import Run
from tiny_models import make_tokenizer

TARGET = tiny_transformer(0)
DRAFT = tiny_transformer(0, num_layers=1)
TEXT = TrainingText(np.array([1, 2, 3, 9, 4, 7, 7, 5, 1, 6], dtype=np.int32), 4)


def test_greedy_labels_say_whether_both_take_the_same_token() -> None:
    states, labels = judged(TARGET, DRAFT, TEXT, temperature=0.0, kept=0.0, seed=0)
    first, tokens = TEXT.written, TEXT.tokens.tolist()
    taken = {}
    for name, model in {"target": TARGET, "draft": DRAFT}.items():
        logits = model.forward(Batch([Segment.chunk(tokens, model.new_cache())])).logits
        taken[name] = logits.argmax(dim=1)[first - 1 : -1]
    assert labels.tolist() == (taken["target"] == taken["draft"]).float().tolist()
    mixed = tokens[:first] + taken["draft"].tolist()
    hidden = DRAFT.forward(Batch([Segment.chunk(mixed, DRAFT.new_cache())]), taps=[1]).hidden[1]
    assert (states - hidden[first:].float()).abs().max() < 1e-6


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    _, labels = judged(TARGET, TARGET, TEXT, temperature=0.7, kept=0.0, seed=0)
    assert labels.tolist() == [1.0] * 6


@pytest.mark.integration
def test_labels_average_to_the_acceptance_of_sampled_drafts() -> None:
    laws = [
        (model.forward(Batch([Segment.chunk(TEXT.tokens, model.new_cache())])).logits / 0.8).softmax(dim=1)[3:-1]
        for model in (TARGET, DRAFT)
    ]
    expected = float(torch.minimum(*laws).sum(dim=1).mean())
    found = [judged(TARGET, DRAFT, TEXT, temperature=0.8, kept=0.0, seed=seed)[1] for seed in range(400)]
    assert float(torch.cat(found).mean()) == pytest.approx(expected, abs=0.03)


def test_a_share_of_the_text_stays() -> None:
    sizes = [len(judged(TARGET, DRAFT, TEXT, temperature=1.0, kept=0.5, seed=seed)[1]) for seed in range(60)]
    assert 2.3 < np.mean(sizes) < 3.7


def test_the_loss_is_least_at_the_truth_and_weighs_rejections() -> None:
    labels = torch.tensor([0.0, 1.0, 0.25])
    chance = torch.tensor([1e-4, 1 - 1e-4, 0.25 / (0.25 + 6 * 0.75)], requires_grad=True)
    loss = weighted_loss(torch.stack((torch.zeros(3), chance.logit()), dim=1), labels, 6.0)
    loss.backward()
    assert chance.grad is not None and abs(float(chance.grad[2])) < 1e-5
    sure = torch.tensor([[0.0, 3.0]])
    wrong, right = (float(weighted_loss(sure, torch.tensor([label]), 6.0)) for label in (0.0, 1.0))
    assert (wrong, right) == (pytest.approx(3.0486, abs=1e-3), pytest.approx(0.0486, abs=1e-3))


SMALL = tiny_transformer(3, vocab_size=8, hidden_size=32, num_layers=1)


def even(odd: float) -> Transformer:
    """A model of nearly even laws whose logits of odd tokens are moved by `odd`."""
    head = Dense(0.3 * SMALL.weights.head.weight, odd * (torch.arange(8).double() % 2))
    return Transformer(SMALL.config, replace(SMALL.weights, head=head))


WRITER, GUESSER = even(-8.0), even(0.0)
"""The target refuses odd tokens, of which the draft knows nothing: what is accepted shows in the token read."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    target = LoadedModel(WRITER, Tokenizer(make_tokenizer()), None, "tiny", "float64")
    prompts = [[number % 8] for number in range(40)]
    return write_texts(target, prompts, tmp_path_factory.mktemp("text"), max_new_tokens=30, temperatures=(1.0,))


def fit(corpus: Corpus, out: Path, draft: Transformer = GUESSER, **settings: Any) -> dict[str, Any]:
    recipe = AcceptanceRecipe(depth=1, epochs=12, lr=0.01, batch=64)
    target = LoadedModel(WRITER, Tokenizer(make_tokenizer()), None, "tiny", "float64")
    return train_acceptance(Run(target, out, (recipe,), **settings), draft, corpus)


@pytest.mark.integration
def test_a_head_learns_and_resumes_to_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    scores = fit(corpus, tmp_path / "whole")
    assert scores["tested on"] == "1 texts that chose nothing"
    constant, control = scores["baselines"]["always the same"]["loss"], scores["shuffled labels"]["loss"]
    assert 0 < scores["loss"] < 0.5 * min(constant, control)
    head = SpecDecPP(str(tmp_path / "whole")).trained
    assert (head.vocab_size, head.hidden_size, head.facts["depth"]) == (8, 32, 1)
    assert head.facts["tokens"] == scores["tokens"] > 900

    def stop(what: str, done: int, total: int) -> None:
        if what == "judging drafts" and done == 36:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(corpus, tmp_path / "parts", progress=stop)
    fit(corpus, tmp_path / "parts")
    again = SpecDecPP(str(tmp_path / "parts" / AcceptanceHead.FILE)).trained
    assert again.facts == head.facts
    assert all(torch.equal(again.parameters()[name], value) for name, value in head.parameters().items())
    states = tmp_path / "parts" / "states" / "00000.safetensors"
    states.write_bytes(states.read_bytes()[:-5])
    with pytest.raises(CorruptFile, match="is damaged: remove it"):
        fit(corpus, tmp_path / "parts")
    with pytest.raises(SettingsError, match="was made with other settings or other data"):
        fit(corpus, tmp_path / "whole", draft=WRITER)


def test_drafts_are_judged_at_the_temperature_that_each_text_was_written_at(tmp_path: Path) -> None:
    target = LoadedModel(WRITER, Tokenizer(make_tokenizer()), None, "tiny", "float64")
    # Texts of one prompt take all temperatures in turns, whatever their numbers are.
    prompts = [[1, 2], [3, 4]] * 12
    written = write_texts(target, prompts, tmp_path / "text", max_new_tokens=6, temperatures=(0.5, 1.0), seed=3)
    found = list[float]()

    def watched(*args: object, temperature: float, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(temperature)
        return judged(*args, temperature=temperature, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decodery.training.acceptance.judged", watched)
        fit(written, tmp_path / "head")
    first = found[::2], found[1::2]
    assert first[0] == [0.5, 1.0] * 6 and first[1] == [1.0, 0.5] * 6


def test_states_of_texts_that_were_judged_in_another_way_are_refused(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(acceptance, "_FORMAT", 1)
        fit(corpus, tmp_path)
    with pytest.raises(SettingsError, match=r"00000\.safetensors was made with other settings"):
        fit(corpus, tmp_path)


def test_a_head_whose_labels_are_shuffled_learns_nothing(corpus: Corpus, tmp_path: Path) -> None:
    # What the comparison with a constant is worth: it tells a head that knows something from one that cannot.
    random = np.random.default_rng(0)

    def shuffled(*args: object, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
        states, labels = judged(*args, **settings)  # type: ignore[arg-type]
        return states, labels[torch.from_numpy(random.permutation(len(labels)))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decodery.training.acceptance.judged", shuffled)
        scores = fit(corpus, tmp_path / "out")
    constant = scores["baselines"]["always the same"]["loss"]
    assert 0.9 * constant < scores["loss"] <= 1.1 * constant


def test_a_folder_of_something_else_is_left_alone(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SettingsError, match="name a new folder"):
        fit(corpus, tmp_path)


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    target = LoadedModel(WRITER, Tokenizer(make_tokenizer()), None, "tiny", "float64")
    few = write_texts(target, [[1]], tmp_path / "few", max_new_tokens=3)
    with pytest.raises(SettingsError, match="1 texts are too few"):
        fit(few, tmp_path / "out")


@pytest.mark.parametrize("settings", [{"depth": -1}, {"rejected": 0.0}, {"kept": 1.0}, {"epochs": 0.0}])
def test_recipes_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="give one in"):
        AcceptanceRecipe(**settings)
