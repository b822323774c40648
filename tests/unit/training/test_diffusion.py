"""A small diffusion model is trained, goes on where it was stopped, and loads as any LLaDA folder does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import decodery as dc
from commands import inside
from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.training import diffusion, grids, lists, llada_folder
from decodery.training.diffusion import DiffusionRecipe, held_out, train_diffusion, untrained
from decodery.training.loop import CHECKPOINT, TrainingPlan

RECIPE = DiffusionRecipe(("copy", "shuffle"), steps=2, batch=16)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


class Stopped(Exception):
    pass


def test_a_run_that_was_stopped_gives_the_model_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_diffusion(RECIPE, tmp_path / "whole", validate_every=1)
    assert whole.metrics["2"]["loss"] < whole.metrics["0"]["loss"]

    def stop(what: str, done: int, total: int) -> None:
        if done == 1:
            raise Stopped

    monkeypatch.setattr(
        diffusion, "TrainingPlan", lambda *steps, **settings: TrainingPlan(*steps, **settings, save_seconds=-1.0)
    )
    with pytest.raises(Stopped):
        train_diffusion(RECIPE, tmp_path / "parts", validate_every=1, progress=stop)
    assert (tmp_path / "parts" / "training" / CHECKPOINT).is_file()
    train_diffusion(RECIPE, tmp_path / "parts", validate_every=1)
    ends = [(tmp_path / name / llada_folder.MODEL).read_bytes() for name in ("whole", "parts")]
    assert ends[0] == ends[1]


def test_the_folder_is_the_model_and_the_command_line_fills_its_canvas(tmp_path: Path) -> None:
    status, said, _ = inside("train", "diffusion", "--out", str(tmp_path / "m"), "--steps", "1", "--batch", "8")
    assert status == 0 and "--diffuse static" in said
    lm = dc.load(str(tmp_path / "m"), dtype="float32")
    assert lm.model.config.mask_id == lists.VOCABULARY.index(lists.MASK) and not lm.model.config.causal
    prompt = "_ _ _ copy a b c d ="
    tokens = lm.encode(prompt, apply_chat_template=False)
    assert tokens == lists.ids(prompt.split())
    model = untrained(DiffusionRecipe(steps=1))
    model_rows = lm.model.forward(Batch([Segment(np.arange(9), np.array(tokens))])).logits
    assert model_rows.shape == (9, model.vocab_size) and bool(torch.isfinite(model_rows).all())
    output = lm.diffuse([prompt] * 2, "freedave", apply_chat_template=False, max_new_tokens=8)
    static = lm.diffuse(prompt, "static", apply_chat_template=False, max_new_tokens=8)
    assert output[0].tokens == output[1].tokens == static.tokens and static.trace.passes <= 8
    given = [
        "generate",
        "-m",
        str(tmp_path / "m"),
        "--dtype",
        "float32",
        "--no-chat-template",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    status, shown, _ = inside(*given, "--diffuse", "static", prompt)
    assert status == 0 and json.loads(shown)["tokens"] == static.tokens
    for options, said in (
        (["--diffuse", "static", "--top-k", "3", "--temperature", "1"], "leave out --top-k"),
        (["--diffuse", "statik"], "try static"),
        ([], "--diffuse threshold"),
    ):
        status, _, refused = inside(*given, *options, prompt)
        assert status != 0 and said in refused


def test_squares_are_all_there_are_and_a_sudoku_has_one_solution() -> None:
    squares, some = grids.latin_squares(), grids.sudokus()
    assert len({bytes(each) for each in squares}) == len(squares) == 576 and len({bytes(each) for each in some}) == 288
    for square in squares:
        assert grids.is_latin([*map(str, square)], ["0", "1", "2", "3"])
    for cells in (squares[0][:15], [*squares[0][:15], squares[0][14]], np.repeat(np.arange(4), 4)):
        assert not grids.is_latin([*map(str, cells)], ["0", "1", "2", "3"])
    for square in some:
        quarters = [square.reshape(4, 4)[row : row + 2, at : at + 2] for row in (0, 2) for at in (0, 2)]
        assert all(sorted(each.reshape(-1).tolist()) == [0, 1, 2, 3] for each in quarters)
    draws = np.random.default_rng(0)
    for _ in range(30):
        square, blank = grids.sudoku(draws)
        assert blank.sum() == grids.BLANKS
        assert grids.solved([None if hidden else int(n) for n, hidden in zip(square, blank, strict=True)]) == [*square]
    # Swapping rows of one band may give another solution: such blanks are never drawn.
    with pytest.raises(ValueError, match="too many"):
        grids.solved([None] * 16)


def test_examples_are_right_answers_and_others_are_told_apart() -> None:
    recipe = DiffusionRecipe(tuple(lists.TASKS), letters=7)
    asked = held_out(recipe, 20 * len(lists.TASKS))
    assert {(len(each.prompt), len(each.canvas)) for each in asked} == {(recipe.prompt, recipe.canvas)} == {(18, 17)}
    assert (
        DiffusionRecipe(letters=7).prompt,
        DiffusionRecipe(letters=7).canvas,
        DiffusionRecipe(("json",), 7).canvas,
    ) == (10, 9, 14)
    assert all(each.right(each.answer) for each in asked)
    assert all(words in lists.VOCABULARY for each in asked for words in each.prompt + each.canvas)
    assert not any(each.right([*each.answer[:-1], "=", "="]) for each in asked)
    sums = [each for each in asked if each.task == "add"]
    for each in sums:
        first, second = ("".join(part) for part in (each.posed[:3], each.posed[4:]))
        assert int("".join(each.answer)) == int(first) + int(second) and len(each.answer) == 4
    for each in (each for each in asked if each.task == "expr"):
        step, value = "".join(each.answer).split("=")
        assert eval("".join(each.posed)) == eval(step) == int(value) >= 0
    groups = [each.answer for each in asked if each.task == "seed-copy"]
    assert all(len({*each[start : start + 3]}) == 1 for each in groups for start in (0, 3, 6))
    names = next(each for each in asked if each.task == "shuffle-names")
    swapped = [*names.answer[2:], *names.answer[:2]]
    assert names.right(swapped) or swapped == names.posed
    # A first name with another's second one is no name of the list.
    assert not names.right([names.answer[0], names.answer[3], names.answer[2], names.answer[1], *names.answer[4:]])
    json_answers = [json.loads("".join(each.answer)) for each in asked if each.task == "json"]
    assert all(1 <= len(each) <= 3 for each in json_answers)
    shuffled = [each for each in asked if each.task == "shuffle"]
    assert not any(each.right(each.posed) for each in shuffled) and all(each.right(each.answer) for each in shuffled)
    lengths = {diffusion.Masked.draw(DiffusionRecipe(places=12), 4, step).weights.shape[1] for step in range(80)}
    assert lengths == set(range(4, 13))
    masked = diffusion.Masked.draw(DiffusionRecipe(tuple(lists.LISTS)), 64, 0)
    hidden = masked.shown[:, 9:] == lists.VOCABULARY.index(lists.MASK)
    assert sorted(np.bincount(hidden.sum(axis=1), minlength=9)[1:].tolist()) == [8] * 8
    assert np.allclose(masked.weights.sum(), 1.0) and not masked.weights[~hidden].any()
    with pytest.raises(SettingsError, match="3 to 26 letters, not 27"):
        DiffusionRecipe(letters=27)
    with pytest.raises(SettingsError, match="no task 'cpy'"):
        DiffusionRecipe(("cpy",))
    with pytest.raises(SettingsError, match="4 to 247 places, not 250"):
        DiffusionRecipe(places=250)
    with pytest.raises(SettingsError, match="no size"):
        DiffusionRecipe(size="xxl")


def test_a_mixture_learns_in_all_its_parts_and_loads_as_llada_moe(tmp_path: Path) -> None:
    recipe = DiffusionRecipe(("copy",), size="xs-moe", steps=1, batch=16)
    train_diffusion(recipe, tmp_path / "m")
    lm, before = dc.load(str(tmp_path / "m"), dtype="float32"), untrained(recipe)
    assert lm.model.config.experts == 16 and lm.model.config.family == "llada_moe" and not lm.model.config.causal
    for name, tensor in llada_folder.named_tensors(before).items():
        after = llada_folder.named_tensors(lm.model)[name]
        assert after.shape == tensor.shape and not torch.equal(after, tensor), name
    rows = np.arange(9)
    scores = lm.model.forward(Batch([Segment(rows, rows)]))
    assert 0 < scores.costs[0].experts <= 3 * 16
