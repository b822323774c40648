"""R2's tuning: states as passes found them, of right answers alone, what the loss wants, and who is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.diffusion.static import Static
from decodery.training.diffusion import DiffusionRecipe, logits_at, train_diffusion, trained, untrained
from decodery.training.diffusion_tuning import DiffusionModel
from decodery.training.kind import Run
from decodery.training.lists import END, MASK, VOCABULARY
from decodery.training.llada_folder import MODEL
from decodery.training.r2 import CanvasStates, R2Recipe, redundancy_loss, states, tune_r2

MASKED = VOCABULARY.index(MASK)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that copies some lists rightly and others not."""
    out = tmp_path_factory.mktemp("r2") / "teacher"
    train_diffusion(DiffusionRecipe(("copy",), letters=3, steps=60, batch=16, lr=3e-3), out)
    return out


@pytest.mark.integration
def test_states_are_what_passes_found_and_only_of_right_answers(teacher: Path) -> None:
    model, settings = trained(teacher), R2Recipe(("copy",), 3, trajectories=48)
    for method in (None, Static()):
        seen = states(model, settings, method)
        prompt = settings.recipe.prompt
        assert 0 < seen.right < 1 and len(seen.shown) >= 48 * seen.right
        masked = seen.shown == MASKED
        assert not masked[:, :prompt].any() and not (seen.written & ~masked).any() and seen.written.any(axis=1).all()
        assert np.array_equal(seen.shown[~masked], seen.tokens[~masked]) and not (seen.tokens == MASKED).any()
        for row in seen.tokens:
            words = [VOCABULARY[token] for token in row]
            posed = [word for word in words[:prompt] if len(word) == 1 and word.isalpha()]
            answer = words[prompt : words.index(END, prompt)]
            assert answer == posed and set(words[prompt + len(answer) :]) == {END}
        if method is not None:
            assert (seen.written.sum(axis=1) == 1).all(), "static decoding writes one place a pass"
    with pytest.raises(SettingsError, match="0 of 4 answers of this model are right"):
        states(untrained(settings.recipe), R2Recipe(("copy",), 3, trajectories=4))


def test_the_loss_wants_what_was_written_more_than_what_was_not() -> None:
    recipe = DiffusionRecipe(("copy",), letters=3)
    model = untrained(recipe)
    random = np.random.default_rng(0)
    length = recipe.prompt + recipe.canvas
    tokens = random.integers(5, 12, (4, length))
    shown = tokens.copy()
    shown[:, recipe.prompt :] = MASKED
    written = np.zeros_like(shown, dtype=bool)
    written[:, recipe.prompt] = True
    some = CanvasStates(shown, tokens, written, 1.0)
    with torch.no_grad():
        alone = float(redundancy_loss(model, some, 0.0, 0.0))
        alike = float(redundancy_loss(model, some, 1.0, 0.0))
        weighed = float(redundancy_loss(model, some, 0.3, 0.0))
        doubting = float(redundancy_loss(model, some, 0.3, 0.05))
        law = logits_at(model, shown, torch.from_numpy(np.flatnonzero(written))).softmax(dim=-1)
        entropy = float(torch.special.entr(law).sum(dim=-1).mean())
    first, count = 4, 4 * recipe.canvas
    rest = (alike * count - alone * first) / (count - first)
    expected = (alone * first + 0.3 * rest * (count - first)) / (first + 0.3 * (count - first))
    assert weighed == pytest.approx(expected, rel=1e-5) and abs(weighed - alike) > 1e-4
    assert doubting - weighed == pytest.approx(0.05 * entropy, rel=1e-4) and entropy > 0.5


@pytest.mark.integration
def test_tuning_makes_the_model_surer_where_it_writes_and_leaves_the_first_alone(teacher: Path, tmp_path: Path) -> None:
    kept = (teacher / MODEL).read_bytes()
    settings = R2Recipe(("copy",), 3, trajectories=48, steps=30, batch=16, lr=1e-3)
    (_, seen), (control, nothing) = (
        tune_r2(Run("", tmp_path / name, (DiffusionModel(teacher), each)))
        for name, each in (("tuned", settings), ("control", replace(settings, control=True)))
    )
    assert (teacher / MODEL).read_bytes() == kept and nothing is None and control.step == 30
    assert seen is not None
    with torch.no_grad():
        before, after, other = (
            float(redundancy_loss(trained(folder), seen, 0.0, 0.0))
            for folder in (teacher, tmp_path / "tuned", tmp_path / "control")
        )
    assert after < min(before, other)
    with pytest.raises(SettingsError, match="give one in"):
        R2Recipe(("copy",), others=-1.0)
