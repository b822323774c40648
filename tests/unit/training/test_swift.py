"""Looking for sublayers to skip beforehand: what is measured, what is kept, and that a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.trained.skips import SkipSet
from decodery.speculative.drafters.swift import Swift, matchness
from decodery.step.forward_request import run_sync
from decodery.testing import check_identical, tiny_transformer
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.kind import Run
from decodery.training.swift import SkipRecipe, TextWindow, find_skips
from tiny_models import VOCAB, make_tokenizer

RECIPE = SkipRecipe(ratio=0.4, proposals=25, bayes=10, read=3, window=6)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    model = tiny_transformer(3, vocab_size=VOCAB, num_layers=6, dtype=torch.float32)
    return LoadedModel(model, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")


@pytest.fixture(scope="module")
def written(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    asked = [[number % 50 + 1, 7] for number in range(20)]
    folder = tmp_path_factory.mktemp("written") / "text"
    return write_texts(target, asked, folder, max_new_tokens=9, temperatures=(0.0,), top=2)


def test_a_window_measures_what_the_drafter_does(target: LoadedModel, written: Corpus) -> None:
    skip, text = frozenset({"attention.2", "mlp.4"}), written[1]
    engine = Engine(target.model)
    seq = engine.submit(Request(text.tokens[: text.written].tolist(), max_new_tokens=9))
    engine.run([seq])
    window = TextWindow(target.model, [text], 6)
    assert window.matchness(skip) == pytest.approx(run_sync(matchness(seq, LayerPlan(skip=skip), 6)))
    assert window.matchness(frozenset()) == 1.0


@pytest.mark.integration
def test_the_best_set_is_kept_and_a_run_goes_on_where_it_stopped(
    target: LoadedModel, written: Corpus, tmp_path: Path
) -> None:
    whole = find_skips(Run(target, tmp_path / "whole", (RECIPE,)), written)
    assert len(whole.skip) == int(8 * 0.4) and whole.facts["best"]["matchness"] >= whole.facts["first"]["matchness"]

    def stop(what: str, done: int, total: int) -> None:
        if done == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_skips(Run(target, tmp_path / "twice", (RECIPE,), progress=stop), written)
    assert not (tmp_path / "twice" / SkipSet.FILE).exists()
    again = find_skips(Run(target, tmp_path / "twice", (RECIPE,)), written)
    assert again.skip == whole.skip and again.facts["best"] == whole.facts["best"]
    assert SkipSet.load(tmp_path / "twice" / SkipSet.FILE).skip == whole.skip
    drafter = Swift(str(tmp_path / "twice"))
    check_identical(target.model, [[1, 2, 3]], drafter=drafter, seeds=(0,), max_new_tokens=12, tested="drafted")
    with pytest.raises(SettingsError, match="other settings"):
        find_skips(Run(target, tmp_path / "twice", (SkipRecipe(ratio=0.2, proposals=3),)), written)
