"""Adapting a model that writes from left to right: what it sees, what it learns, and that the result fills canvases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.hooks import Hooks
from decodery.models.layer_plan import WHOLE, layer_steps
from decodery.models.loaders.load import load
from decodery.models.torch.side_by_side import SideBySide
from decodery.training import to_diffusion
from decodery.training.kind import Run
from decodery.training.to_diffusion import (
    Adaptation,
    AdaptedModel,
    WordTask,
    adapt,
    annealed_mask,
    draw_tasks,
    end_and_mask,
    held_out,
)
from trained_kinds import save_word_model

SETTINGS = Adaptation(("copy", "replace"), 2, 3, 5, rank=4, steps=6, batch=4, lr=1e-2)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return save_word_model(tmp_path / "tiny")


def test_examples_say_what_is_right() -> None:
    words = ("apple", "river", "stone")
    answers = {task: WordTask(task, words).answer for task in to_diffusion.TASKS}
    assert answers == {"copy": " apple river stone", "reverse": " stone river apple", "replace": " apple new stone"}
    assert WordTask("copy", words).right("apple river\nstone ") and not WordTask("reverse", words).right(
        "apple river stone"
    )
    draws = np.random.default_rng(0)
    some = draw_tasks(SETTINGS, 1, 8, draws)
    assert {each.task for each in some} == {"replace"} and len({len(each.words) for each in some}) == 1
    assert {each.task for each in held_out(SETTINGS, 4)} == {"copy", "replace"}
    with pytest.raises(SettingsError, match="tasks of the adaptation are copy, reverse, replace"):
        Adaptation(("sort",))


def test_the_mask_opens_and_what_lies_before_stays_seen() -> None:
    draws = np.random.default_rng(0)
    causal = np.tri(12, dtype=bool)
    shares = [annealed_mask(12, share, draws).numpy() for share in (0.0, 0.4, 1.0)]
    assert np.array_equal(shares[0], causal) and shares[2].all()
    assert (shares[1] | ~causal).all() and 0.2 < shares[1][~causal].mean() < 0.6


def test_the_loss_is_that_of_the_row_in_front_of_each_masked_place(tiny: Path) -> None:
    adapted = AdaptedModel(load(str(tiny), dtype="float32", device="cpu"), SETTINGS)
    adapted._bfloat16 = False
    draws = np.random.default_rng(0)
    step = adapted.masked(draw_tasks(SETTINGS, 0, 4, draws), draws)
    masked = step.shown != step.tokens
    assert masked.any() and (step.shown[masked] == adapted.mask_id).all() and not masked[:, :-5].any()
    assert step.weights.sum() == pytest.approx(1.0) and ((step.weights > 0) == masked).all()
    model = adapted.original
    tokens = torch.from_numpy(step.shown)
    with torch.no_grad():
        found = float(adapted.loss(step, 1.0, draws))
        rows = model.embed_tokens(tokens.flatten())
        rows[tokens.flatten() == adapted.mask_id] = adapted.mask_row
        texts = SideBySide(model, *tokens.shape, torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool))
        hidden = model.blocks(rows, texts, layer_steps(WHOLE, model.config.num_layers), Hooks.reading(()))
        logits = model.outputs(hidden).unflatten(0, tuple(tokens.shape))
        logits[..., adapted.mask_id] = -torch.inf
        law = logits.log_softmax(dim=-1)

        def expected(ahead: int) -> float:
            places = np.argwhere(masked)
            return sum(
                -float(law[row, place - 1 + ahead, step.tokens[row, place]] * step.weights[row, place])
                for row, place in places
            )

    assert found == pytest.approx(expected(0), rel=1e-4)
    # A row that predicts its own place is another model's loss.
    assert abs(found - expected(1)) > 1e-3


@pytest.mark.integration
def test_an_adapted_model_fills_canvases_and_goes_on_where_it_stopped(tiny: Path, tmp_path: Path) -> None:
    import decodery

    loaded = load(str(tiny), dtype="float32", device="cpu")
    _, mask = end_and_mask(loaded)
    report = adapt(Run(loaded, tmp_path / "whole", (SETTINGS,)))
    found = decodery.load(str(tmp_path / "whole"), dtype="float32", device="cpu")
    config = found.model.config
    assert not config.causal and config.shifted and config.mask_id == mask
    out = found.diffuse(held_out(SETTINGS, 1)[0].prompt, "static", apply_chat_template=False, max_new_tokens=5)
    assert isinstance(out, decodery.Output) and len(out.tokens) <= 5 and mask not in out.tokens
    # What was learned is in it: it says of held-out lists what the adapted said at its best.
    assert report["loss"] < report["baselines"]["untrained"]["loss"]
    assert not torch.equal(loaded.model.weights.embedding[mask], found.model.weights.embedding[mask])
    with pytest.raises(UnsupportedModel, match="fills canvases already"):
        adapt(Run(load(str(tmp_path / "whole"), dtype="float32", device="cpu"), tmp_path / "again", (SETTINGS,)))
    with pytest.raises(SettingsError, match="raise places"):
        adapt(Run(loaded, tmp_path / "short", (Adaptation(("copy",), 3, 3, places=3),)))
