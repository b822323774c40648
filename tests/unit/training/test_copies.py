"""Copies in another form that learn: what their layers compute and pass back, and what learning is worth."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import inside
from covering import some
from decodery.compression import Int8, LQLoRA
from decodery.compression.base import transformed
from decodery.compression.bitnet import three
from decodery.compression.folder import save
from decodery.core.errors import SettingsError
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.native.ternary import TernaryLinear
from decodery.models.torch.weights import Dense
from decodery.training.bitnet import TernaryRemaking, rounded
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.hyperfit import HyperfitRecipe
from decodery.training.kind import Run
from decodery.training.lq_lora import LowRankRemaking
from decodery.training.nm_sparsity import SparseRemaking
from decodery.training.remade import CopyRecipe, Remaking, TrainingProgress, train_copy
from decodery_benchmarks.training.grpo import GRPORecipe
from tiny_models import tiny_loaded

REMAKINGS: dict[str, Remaking] = {
    "bitnet": TernaryRemaking(),
    "nm-sparsity": SparseRemaking(n=1, m=4),
    "lq-lora": LowRankRemaking(LQLoRA(bits=2, rank=2, block=16)),
}
ROWS = torch.randn(7, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def matrix(outputs: int = 48, inputs: int = 64, seed: int = 0) -> Dense:
    draws = torch.Generator().manual_seed(seed)
    return Dense(torch.randn(outputs, inputs, generator=draws, dtype=torch.float64).requires_grad_())


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def written(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[number % 50 + 1, 7] for number in range(120)]
    return write_texts(target, prompts, tmp_path_factory.mktemp("written") / "text", max_new_tokens=16, top=8)


@pytest.mark.parametrize("name", REMAKINGS)
def test_a_form_computes_what_it_becomes(name: str) -> None:
    form = REMAKINGS[name].form("layers.0.down", matrix(), TrainingProgress())
    with torch.no_grad():
        seen, kept = form(ROWS), form.made(8).linear
        alike = kept(ROWS.float()).double() if isinstance(kept, TernaryLinear) else kept(ROWS)
        assert (seen - alike).abs().max() < 1e-6 * seen.abs().max()
        # Half of the way there it would not be.
        other = REMAKINGS[name].form("layers.0.down", matrix(), TrainingProgress(0.2))(ROWS)
    assert name == "lq-lora" or (other - alike).abs().max() > 1e-2 * seen.abs().max()


def test_ternary_weights_have_three_values_and_gradients_go_straight_through() -> None:
    whole = matrix()
    form = TernaryRemaking().form("layers.0.down", whole, TrainingProgress())
    form(ROWS).square().sum().backward()
    trits, scale = three(whole.weight, "median")
    assert sorted(trits.unique().tolist()) == [-1.0, 0.0, 1.0]
    # Of an even number of magnitudes it is the lower one in the middle, in half precision.
    middle = whole.weight.detach().abs().flatten().sort().values[whole.weight.numel() // 2 - 1]
    assert float(scale) == float(middle.half()) != float(three(whole.weight, "mean")[1])
    coarse = (trits * scale).requires_grad_()
    torch.nn.functional.linear(rounded(ROWS), coarse).square().sum().backward()
    assert whole.weight.grad is not None and coarse.grad is not None
    assert torch.allclose(whole.weight.grad, coarse.grad, rtol=1e-12)
    assert len(torch.unique((form.made(4).linear.dense() / scale.float()).round())) == 3
    # Before rounding comes in it is the layer itself.
    plain = TernaryRemaking().form("layers.0.down", matrix(), TrainingProgress(0.0))(ROWS)
    assert torch.equal(plain, ROWS @ matrix().weight.T)


@pytest.mark.parametrize("straight", [False, True])
def test_what_is_left_out_learns_by_what_is_left_of_it(straight: bool) -> None:
    remaking = SparseRemaking(n=2, m=4, schedule="linear", dense=0.0, decay=0.5, straight=straight)
    whole, progress_made = matrix(), TrainingProgress(0.2)
    form = remaking.form("layers.0.down", whole, progress_made)
    form(ROWS).square().sum().backward()
    left = remaking.left(progress_made.done)
    assert left == pytest.approx(0.6)
    order = whole.weight.detach().abs().view(-1, 4).argsort(dim=1, descending=True)
    others = torch.ones_like(order, dtype=torch.bool).scatter_(1, order[:, :2], False).view_as(whole.weight)
    seen = torch.where(others, left, 1.0) * whole.weight.detach()
    upstream = 2 * (ROWS @ seen.T).T @ ROWS
    wanted = upstream if straight else torch.where(others, left, 1.0) * upstream
    assert whole.weight.grad is not None and torch.allclose(whole.weight.grad, wanted)
    assert not torch.allclose(
        whole.weight.grad, upstream if not straight else torch.where(others, left, 1.0) * upstream
    )
    # By finite differences: what the product rule says, and straight gradients do not.
    at = tuple(int(each) for each in others.nonzero()[3])
    values = []
    for step in (1e-6, -1e-6):
        moved = matrix()
        with torch.no_grad():
            moved.weight[at] += step
            values.append(float(remaking.form("layers.0.down", moved, progress_made)(ROWS).square().sum()))
    slope = (values[0] - values[1]) / 2e-6
    assert (abs(slope - float(whole.weight.grad[at])) < 1e-4 * abs(slope)) != straight


def test_schedules_end_in_n_of_m_and_sr_ste_makes_the_others_smaller() -> None:
    for schedule, n, m in itertools.product(("linear", "exponential", "structure", "sr-ste"), (1, 2), (8,)):
        remaking = SparseRemaking(n, m, schedule)  # type: ignore[arg-type]
        done = np.linspace(0, 1, 41)
        left, kept = [remaking.left(each) for each in done], [remaking.kept(each) for each in done]
        assert left == sorted(left, reverse=True) and kept == sorted(kept, reverse=True)
        assert (left[-1], kept[-1]) == (0.0, n) and (left[0] == 1.0) == (schedule != "sr-ste")
        groups = remaking.form("layers.0.down", matrix(), TrainingProgress()).made(4).linear.weight.view(-1, m)
        assert int((groups != 0).sum(dim=1).max()) == n
    steps = list(dict.fromkeys(SparseRemaking(1, 16, "structure").kept(each) for each in np.linspace(0, 1, 101)))
    assert steps == [15, 8, 4, 2, 1]
    plain, decaying = matrix(), matrix()
    SparseRemaking(2, 4, "linear", straight=True).form("layers.0.down", plain, TrainingProgress())(
        ROWS
    ).sum().backward()
    SparseRemaking(2, 4, "sr-ste").form("layers.0.down", decaying, TrainingProgress())(ROWS).sum().backward()
    difference = decaying.weight.grad - plain.weight.grad  # type: ignore[operator]
    assert torch.allclose(difference[difference != 0], 2e-4 * plain.weight.detach()[difference != 0])
    assert int((difference != 0).sum()) == difference.numel() // 2


@pytest.mark.parametrize("name", some(list(REMAKINGS), 1))
def test_a_copy_learns_back_what_its_form_takes(
    name: str, target: LoadedModel, written: Corpus, tmp_path: Path
) -> None:
    before = [each.clone() for each in tensors(target)]
    recipe = CopyRecipe(steps=40, batch=8, lr=3e-3)
    scores = train_copy(Run(target, tmp_path / "copy", (recipe,)), written, REMAKINGS[name])
    assert scores["cross_entropy"] < scores["baselines"]["untrained"]["cross_entropy"]
    assert scores["tested on"].endswith(" prompts that chose nothing")
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(target), strict=True))
    copy = load(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "report.json").read_text())["of"] == "tiny"

    # Ended in the middle, it goes on to the same bits.
    def stop(what: str, done: int, total: int) -> None:
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_copy(Run(target, tmp_path / "again", (recipe,), progress=stop), written, REMAKINGS[name])
    assert train_copy(Run(target, tmp_path / "again", (recipe,)), written, REMAKINGS[name]) == scores
    for old, new in zip(tensors(copy), tensors(load(tmp_path / "again")), strict=True):
        assert torch.equal(old, new)
    with pytest.raises(SettingsError, match="other settings"):
        train_copy(Run(target, tmp_path / "again", (CopyRecipe(steps=41, batch=8),)), written, REMAKINGS[name])


def test_rates_that_teach_nothing_are_refused_before_anything_is_written() -> None:
    for recipe in (CopyRecipe, HyperfitRecipe, GRPORecipe):
        for lr in (0.0, -1e-3, float("nan")):
            with pytest.raises(SettingsError, match="lr"):
                recipe(lr=lr)
    with pytest.raises(SettingsError, match="enough"):
        HyperfitRecipe(enough=float("nan"))


def tensors(loaded: LoadedModel) -> list[torch.Tensor]:
    layers = [part for layer in loaded.model.weights.layers for part in vars(layer).values() if part is not None]  # type: ignore[attr-defined]
    return [t for part in layers for t in ([part] if isinstance(part, torch.Tensor) else part.tensors().values())]


@pytest.mark.integration
@pytest.mark.parametrize(
    "command", [["bitnet", "--measure", "mean"], ["nm-sparsity", "--schedule", "structure"], ["lq-lora", "--rank", "2"]]
)
def test_the_commands_make_copies_that_draft(command: list[str], target: LoadedModel, tmp_path: Path) -> None:
    model, copy, prompts = str(tmp_path / "model"), str(tmp_path / "copy"), tmp_path / "prompts.txt"
    save(tmp_path / "model", *transformed(target.model, [Int8()]), target)
    prompts.write_text("ab\nba\n")
    learning = ["--texts", "20", "--max-new-tokens", "8", "--steps", "3", "--prompts", str(prompts)]
    code, output, errors = inside("train", *command, "-m", model, "--out", copy, *learning)
    assert code == 0 and f"draft-model:model={copy}" in output and '"untrained"' in output, errors
    drafting = ["--drafter", f"draft-model:model={copy}", "--max-new-tokens", "8"]
    code, drafted, errors = inside("generate", "ab", "-m", model, *drafting)
    assert code == 0, errors
    assert drafted == inside("generate", "ab", "-m", model, "--drafter", "none", "--max-new-tokens", "8")[1]
