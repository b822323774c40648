"""One model begins a canvas and another goes on: as if the other had found it so, and each alone at the ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.phase_handoff import PhaseHandoff
from decodery.diffusion.run import filled
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import run_sync
from decodery.testing.models import Counted
from diffusing import KINDS, PROMPT, denoiser, fill, named, order

LENGTH = 11  # with the prompt four blocks of four
TRIED = [("full", "cache=dual,block=11"), ("full", ""), ("shifted", "cache=dkv"), ("blocks", "cache=prefix")]


@pytest.mark.parametrize(("kind", "own"), TRIED)
def test_the_second_model_goes_on_as_behind_a_canvas_that_it_finds(kind: str, own: str) -> None:
    model, other = denoiser(1, **KINDS[kind]), denoiser(2, **KINDS[kind])
    # A canvas that is found half written has had no passes, so noise is that of positions.
    policy = named("random:" + ",".join(("noise=position", *filter(None, [own]))))
    settings = {"temperature": 0.8, "seed": 3}
    search = PhaseHandoff("random", block=policy.block, cache=policy.cache, noise="position", model=other)
    alone = [order(fill(each, policy, LENGTH, **settings)) for each in (model, other)]
    assert alone[0] != alone[1]
    for steps, begins, wanted in ((0, "model", 1), (99, "model", 0), (0, "second", 0), (99, "second", 1)):
        ends = replace(search, steps=steps, begins=begins)  # type: ignore[arg-type]
        assert order(fill(model, ends, LENGTH, **settings)) == alone[wanted]
    counted = [Counted(model), Counted(other)]
    canvas = fill(counted[0], replace(search, steps=5, model=counted[1]), LENGTH, **settings)  # type: ignore[arg-type]
    assert [len(each.rows) for each in counted] == [5, canvas.passes - 5]
    assert order(canvas)[:5] == alone[0][:5]
    # Whatever the first model kept of its passes, the second sees what is written and nothing else.
    half = Canvas.of(other, PROMPT, LENGTH, seed=3)
    for place, token in alone[0][:5]:
        half.tokens[place] = token
    if "dual" not in own and "dkv" not in own:
        run_sync(filled(other, half, policy, 0.8))
        assert np.array_equal(half.tokens, canvas.tokens)
    assert not np.array_equal(canvas.tokens, fill(model, policy, LENGTH, **settings).tokens)


def test_models_that_do_not_go_together_are_refused() -> None:
    model = denoiser()
    for other, words in (
        (denoiser(2, mask_id=3), "another vocabulary"),
        (denoiser(2, shifted=True), "predict other positions"),
        (denoiser(2, block_length=4), "attend to other blocks"),
    ):
        with pytest.raises(SettingsError, match=words):
            fill(model, PhaseHandoff(model=other), LENGTH)
    for settings, words in (
        ({}, "needs a second model: name one"),
        ({"model": model, "steps": -1}, "at least 0"),
        ({"model": model, "begins": "small"}, "not 'small'"),
        ({"model": model, "policy": "freedave"}, "passes over one state"),
        ({"model": model, "policy": "static:block=4"}, "settings of phase-handoff itself"),
    ):
        with pytest.raises(SettingsError, match=words):
            PhaseHandoff(**settings)
    assert isinstance(model, Transformer) and not PhaseHandoff(model=model).revises
