"""The learned filter: its limits are static decoding, its labels what that wrote, and it learns something."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import inside
from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.filter import Filter
from decodery.diffusion.learn2pd import Learn2PD, block
from decodery.diffusion.texts import fill_all
from decodery.diffusion.view import View
from decodery.engine.engine import Engine
from decodery.training.diffusion import DiffusionRecipe, held_out, train_diffusion
from decodery.training.learn2pd import LabelledBlocks, Replay, fit_filter, labelled
from diffusing import PROMPT, denoiser, fill, order

END = 7


def certain(places: int, value: float) -> Filter:
    """Takes all for final, or nothing."""
    zeros = torch.zeros(places, places)
    return Filter(zeros, torch.zeros(places), zeros, torch.full((places,), value))


@torch.no_grad()
def test_its_limits_are_static_decoding_and_everything_at_once() -> None:
    model = denoiser()
    static = fill(model, "static:block=8")
    assert order(fill(model, Learn2PD(certain(8, 30.0), rho=1.0, block=8))) == order(static)
    assert order(fill(model, Learn2PD(certain(8, -30.0), block=8))) == order(static)
    assert fill(model, Learn2PD(certain(8, 30.0), block=8)).passes == 2
    cached = Learn2PD(certain(8, -30.0), block=8, cache="dual")
    assert order(fill(model, cached)) == order(fill(model, "static:block=8,cache=dual"))


@torch.no_grad()
def test_labels_are_what_static_decoding_wrote_and_a_filter_without_fault_takes_the_replay() -> None:
    model, prompts = denoiser(), [PROMPT[:n] for n in (2, 3, 5)]
    found = labelled(Engine(model), model, prompts, 8, 4)
    assert found.static == 3 * 8 and found.passes <= found.static and found.prompt.tolist() == sorted(found.prompt)
    assert len(found.prompt) == found.passes and not (found.final & ~found.open).any()
    for prompt in prompts:
        wanted = fill(model, "static:block=4", 8, prompt=prompt).tokens
        seen: list[tuple[np.ndarray, ...]] = []
        again = Canvas.of(model, prompt, 8)
        fill_all(Engine(model), model, [again], Replay(answers=wanted, seen=seen, places=4, block=4), 0.0)
        assert again.tokens.tolist() == wanted.tolist() and len(seen) == again.passes
        for confidence, final, is_open in seen:
            assert (confidence[~is_open] == 1).all() and (confidence[is_open] < 1).all() and not final[~is_open].any()


def seen(confidence: list[float], tokens: list[int]) -> View:
    places = np.arange(len(tokens)) + 5
    logprobs = torch.zeros(len(tokens), 20, dtype=torch.float64)
    return View(places, np.array(tokens), np.array(confidence), logprobs, (5, 13))


@pytest.mark.parametrize(
    ("cut", "value", "length", "written"),
    [
        ("filter", 30.0, 5 + 3, [5, 6, 7]),  # the first end that is taken for final
        ("filter", -30.0, 5 + 8, [9]),  # none is: the surest proposal alone
        ("any", -30.0, 5 + 5, [9]),  # the surest end, and that is the surest of all
        ("never", 30.0, 5 + 8, [5, 6, 7, 8, 9]),
    ],
)
def test_where_the_canvas_is_cut(cut: str, value: float, length: int, written: list[int]) -> None:
    method = Learn2PD(certain(8, value), cut=cut)  # type: ignore[arg-type]
    canvas = Canvas.of(denoiser(), PROMPT, 8, eos_ids=[END])
    view = seen([0.5, 0.4, 0.6, 0.3, 0.7], [1, 2, END, 3, END])
    commit, _ = method.select(view, (canvas, method.filter))
    assert len(canvas) == length and commit.positions.tolist() == written
    assert block(view, 9).tolist() == pytest.approx([0.5, 0.4, 0.6, 0.3, 0.7, 1, 1, 1, 1])
    behind = Learn2PD(certain(8, -30.0), cut="any").select(
        seen([0.9, 0.6, 0.95], [1, END, 2]), (canvas, certain(8, -30.0))
    )
    assert behind[0].positions.tolist() == [5], "the surest was behind the cut"


@pytest.mark.integration
def test_a_filter_learns_what_one_confidence_does_not_say() -> None:
    """Final is what has a sure neighbour; the confidence alone does not tell, nor does a filter without training."""
    draws = torch.Generator().manual_seed(0)
    sure = torch.rand(300, 4, generator=draws)
    final = sure.roll(1, 1) > 0.5
    rows = LabelledBlocks(sure, final, torch.ones_like(final), torch.arange(300), 1, 1)
    _, figures = fit_filter(rows, epochs=150, lr=3e-2)
    assert figures["auc"] > 0.9 > 0.7 > figures["plain_auc"] and figures["precision"] > 0.8
    _, untrained = fit_filter(rows, epochs=0)
    assert untrained["auc"] < 0.8
    with pytest.raises(SettingsError, match="at least 10"):
        fit_filter(rows.of(3, 300))


def test_one_command_trains_it_and_another_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    recipe = DiffusionRecipe(("copy",), steps=1, batch=8)
    train_diffusion(recipe, tmp_path / "m")
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(" ".join(each.prompt) for each in held_out(recipe, 12)))
    model, out = (
        ["-m", str(tmp_path / "m"), "--dtype", "float32", "--no-chat-template", "--max-new-tokens", "8"],
        tmp_path / "f",
    )
    status, said, _ = inside(
        "train", "learn2pd", str(lines), "--out", str(out), *model, "--block", "8", "--epochs", "20"
    )
    assert status == 0 and f"learn2pd:filter={out},block=8" in said and '"plain_auc"' in said
    assert 'prompts that chose nothing"' in said
    prompt = lines.read_text().splitlines()[0]
    status, shown, _ = inside("generate", *model, "--json", "--diffuse", f"learn2pd:filter={out}", prompt)
    assert status == 0 and len(json.loads(shown)["tokens"]) <= 8
    with pytest.raises(SettingsError, match="another model"):
        fill(denoiser(), f"learn2pd:filter={out}", 8)
    with pytest.raises(SettingsError, match="add block=8"):
        fill(denoiser(), Learn2PD(certain(8, 1.0)), 16)
    with pytest.raises(SettingsError, match="`decodery train learn2pd"):
        fill(denoiser(), "learn2pd", 8)
    with pytest.raises(ModelNotFound, match="`decodery train learn2pd"):
        fill(denoiser(), "learn2pd:filter=nowhere", 8)
    (tmp_path / "bad").write_bytes(b"{}")
    with pytest.raises(CorruptFile):
        fill(denoiser(), f"learn2pd:filter={tmp_path / 'bad'}", 8)
