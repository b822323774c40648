"""What early exits learn: labels, corrections of the head, classifiers, and that a run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.calm import CALM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.trained.exits import CONTINUE, EXIT, EXITS, HEADS, STOP, ExitHeads, Exits, agreeing
from decodery.testing import tiny_transformer
from decodery.testing.models import to_int8
from decodery.training.calm import CalmRecipe, calibrate
from decodery.training.card import check_folder
from decodery.training.corpus import Corpus
from decodery.training.data import cut_files, write_texts
from decodery.training.exits import ExitChecks, fit_agreement
from decodery.training.kind import KINDS, Run
from decodery.training.sec import SECRecipe, labels, train_sec
from tiny_models import VOCAB, whole_tokenizer

RECIPE = SECRecipe(every=1, rank=16, epochs=10.0, lr=1e-2)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    model = tiny_transformer(3, vocab_size=VOCAB, num_layers=3, dtype=torch.float32)
    return LoadedModel(model, Tokenizer(whole_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("cut")
    words = np.random.default_rng(0).choice(["north ", "south ", "east. ", "west! "], 160)
    (folder / "file").write_text("".join(words))
    files = {"tokenizer": target.tokenizer, "vocab_size": VOCAB, "length": 32}
    return cut_files([folder / "file"], folder / "text", **files)  # type: ignore[arg-type]


def test_labels_are_those_of_a_slow_double_loop() -> None:
    random = np.random.default_rng(0)
    right = torch.from_numpy(random.random((200, 5)) < random.random((200, 1)))
    found = labels(right)
    for row, flags in enumerate(right.tolist()):
        first = next((layer for layer, flag in enumerate(flags) if flag), None)
        for layer in range(4):
            expected = STOP if first is None else EXIT if layer >= first else CONTINUE
            assert int(found[row, layer]) == expected
    assert {STOP, EXIT, CONTINUE} == set(found.flatten().tolist())


def test_states_at_checks_go_with_the_token_that_follows(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    checks = ExitChecks(target, 1)
    reading = checks.read(corpus, tmp_path, lambda *_: None)
    places, tokens = reading[3], corpus[3].tokens
    assert places.following.tolist() == tokens[1:].tolist() and places.states.shape == (31, 2, 32)
    engine = Engine(target.model)
    for place in (0, 20, 30):
        seq = engine.submit(Request(tokens[: place + 1].tolist(), max_new_tokens=1))
        engine.run([seq])
        assert int(places.last[place]) == seq.generated[0]


@pytest.mark.integration
def test_heads_learn_what_the_early_layers_know_and_a_run_goes_on(
    target: LoadedModel, corpus: Corpus, tmp_path: Path
) -> None:
    whole = train_sec(Run(target, tmp_path / "whole", (RECIPE,)), corpus)
    found = whole.facts["validation"]
    before, after = (found[f"right with the {kind} head"] for kind in ("plain", "corrected"))
    # A random model is hardly ever right; its states tell the token before, which often decides the next one.
    assert max(before) < 0.1 and min(after[:-1]) > 0.4
    assert found["stop, right where said"] > found["stop, of all"] + 0.2
    assert found["right"] > found["baselines"]["the most frequent class of a check"]["right"] + 0.1
    assert found["right"] > found["shuffled labels"]["right"] + 0.1

    def stop(what: str, done: int, total: int) -> None:
        if what == "training a classifier" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_sec(Run(target, tmp_path / "parts", (RECIPE,), progress=stop), corpus)
    assert not (tmp_path / "parts" / HEADS).exists()
    train_sec(Run(target, tmp_path / "parts", (RECIPE,)), corpus)
    assert (tmp_path / "parts" / HEADS).read_bytes() == (tmp_path / "whole" / HEADS).read_bytes()
    assert torch.equal(ExitHeads.load(tmp_path / "whole" / HEADS).up, whole.up)
    with pytest.raises(SettingsError, match="other settings"):
        train_sec(Run(target, tmp_path / "parts", (SECRecipe(every=1, rank=4),)), corpus)


def test_what_cannot_be_trained_is_refused(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="floating point"):
        train_sec(Run(target, tmp_path / "int8", learning=to_int8(target.model)), corpus)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="has 3 layers"):
        train_sec(Run(target, tmp_path / "deep", (SECRecipe(every=3),)), corpus)
    with pytest.raises(SettingsError, match="rank is 0: give one in"):
        SECRecipe(rank=0)
    few = write_texts(target, [[1, 2]] * 5, tmp_path / "few", max_new_tokens=4)
    with pytest.raises(SettingsError, match="too few texts"):
        train_sec(Run(target, tmp_path / "out", (RECIPE,)), few)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SettingsError, match="name a new folder"):
        check_folder(tmp_path, KINDS["sec"].file)


@pytest.mark.integration
def test_a_classifier_knows_where_the_last_layer_agrees(target: LoadedModel, tmp_path: Path) -> None:
    asked = [[number] for number in range(1, 201)]
    texts = write_texts(target, asked, tmp_path / "text", max_new_tokens=12)
    reading = ExitChecks(target, 1).read(texts, tmp_path / "states", lambda *_: None)
    classifier, figures = fit_agreement(reading, tmp_path / "classifier", progress=lambda *_: None)
    assert figures["balanced accuracy"] > 0.55
    # As slowly as can be, of one place: the probability, and whether the head says the last layer's token.
    places = reading[reading.held[0]]
    state = places.states[2, 1].double()
    scaled = state / state.square().mean().sqrt()
    odds = float(scaled @ classifier[:-1].double() + classifier[-1])
    assert float(agreeing(places.states[2], classifier)[1]) == pytest.approx(1 / (1 + np.exp(-odds)))
    said = int(target.model.head(places.states[2, 1:2]).argmax())  # type: ignore[attr-defined]
    assert said == int(reading.checks.said(places.states)[2, 1])


@pytest.mark.integration
def test_calm_is_calibrated_with_a_classifier_of_its_own(target: LoadedModel, tmp_path: Path) -> None:
    asked = [[number % 50 + 1, 7] for number in range(40)]
    recipe = CalmRecipe("classifier", every=1, tokens=6, delta=0.45, epsilon=0.3)
    found = calibrate(Run(target, tmp_path, (recipe,)), asked[:12], learned=asked[12:])
    assert found.classifier is not None and found.facts["classifier"]["agreement"] < 1
    loaded = Exits.load(tmp_path / EXITS)
    assert torch.equal(loaded.classifier, found.classifier)  # type: ignore[arg-type]
    engine = Engine(target.model)
    sources = [CALM(calibration=str(tmp_path)), CALM(calibration=found), CALM(2.0, calibration=found), None]
    sources += [CALM(0.0, calibration=found)]
    texts = [engine.submit(Request(asked[0], max_new_tokens=6, logits_source=source)) for source in sources]
    engine.run(texts)
    one, same, never, plain, always = (text.generated for text in texts)
    assert one == same and never == plain != always
    with pytest.raises(SettingsError, match="too few texts"):
        calibrate(Run(target, tmp_path / "few", (recipe,)), asked[:12], learned=asked[12:14])
