"""Consistency distillation: masks inside masks, its schedule, what has no loss, and who is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.models.loaders.load import load
from decodery.training.diffusion import DiffusionRecipe, train_diffusion, untrained
from decodery.training.diffusion_tuning import DiffusionModel
from decodery.training.dscd import NestedMasks, SelfDistillationRecipe, distil, losses
from decodery.training.kind import Run
from decodery.training.llada_folder import MODEL

LONG = SelfDistillationRecipe(("json",), letters=12, steps=10, batch=32)


def test_masks_of_the_teacher_lie_inside_those_of_the_student_and_never_in_a_prompt() -> None:
    for settings, places in ((LONG, 26), (SelfDistillationRecipe(("copy",), steps=10, batch=32), 8)):
        nested = NestedMasks.draw(settings, 3)
        assert settings.recipe.canvas == places and not (nested.teacher & ~nested.student).any()
        assert not nested.student[:, : settings.recipe.prompt].any()
        student, teacher = nested.student.sum(axis=1), nested.teacher.sum(axis=1)
        if places <= 10:
            assert set(student) == {2} and set(teacher) == {1}
        else:
            assert student.min() >= 10 and student.max() <= 23 and len(set(student)) > 5 and (teacher < student).all()
        again = NestedMasks.draw(settings, 3)
        assert np.array_equal(again.tokens, nested.tokens) and not np.array_equal(
            NestedMasks.draw(settings, 4).tokens, nested.tokens
        )


def test_the_share_of_consistency_and_what_loses_nothing() -> None:
    assert [LONG.share(step) for step in (0, 1, 10)] == pytest.approx([0.9, 0.9, 0.5])
    assert 0.5 < LONG.share(5) < 0.9
    model, other = untrained(DiffusionRecipe()), untrained(DiffusionRecipe(seed=1))
    nested = NestedMasks.draw(LONG, 0)
    same = NestedMasks(nested.tokens, nested.student, nested.student)
    for everywhere in (False, True):
        settings = SelfDistillationRecipe(("json",), letters=12, everywhere=everywhere)
        assert float(losses(model, model, same, settings)[0]) == pytest.approx(0.0, abs=1e-5)
        assert float(losses(model, other, same, settings)[0]) > 0.1
    differ = (
        float(losses(model, model, nested, LONG)[0]),
        float(losses(model, model, nested, SelfDistillationRecipe(("json",), 12, everywhere=True))[0]),
    )
    assert min(differ) > 1e-4 and differ[0] != differ[1], "fuller canvases say something else"


def test_the_student_is_trained_and_its_teacher_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    train_diffusion(DiffusionRecipe(("copy",), steps=1, batch=8), tmp_path / "teacher")
    kept = (tmp_path / "teacher" / MODEL).read_bytes()
    settings = SelfDistillationRecipe(("copy",), steps=2, batch=8)
    ends = []
    for name, each in (
        ("student", settings),
        ("control", SelfDistillationRecipe(("copy",), steps=2, batch=8, control=True)),
    ):
        distil(Run("", tmp_path / name, (DiffusionModel(tmp_path / "teacher"), each)))
        ends.append((tmp_path / name / MODEL).read_bytes())
        assert not load(str(tmp_path / name), dtype="float32").model.config.causal
    assert (tmp_path / "teacher" / MODEL).read_bytes() == kept and len({*ends, kept}) == 3
    with pytest.raises(SettingsError, match="temperature is 0: give one in"):
        SelfDistillationRecipe(("copy",), temperature=0)
    teacher = untrained(DiffusionRecipe())
    consistency, data = losses(untrained(DiffusionRecipe(seed=1)), teacher, NestedMasks.draw(settings, 0), settings)
    assert not consistency.requires_grad and not data.requires_grad
    for layer in teacher.weights.layers:
        layer.mlp_norm.requires_grad_()
    assert not losses(untrained(DiffusionRecipe(seed=1)), teacher, NestedMasks.draw(settings, 0), settings)[
        0
    ].requires_grad
    assert isinstance(data, torch.Tensor)
