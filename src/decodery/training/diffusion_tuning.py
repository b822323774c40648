"""Train a model of `train_diffusion` further: what its kinds share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.models.torch.transformer import Transformer

from .diffusion import HELD, DiffusionRecipe, Masked, distance, learn, tested, trained
from .kind import ARGUMENT, Bounded, Data, Run, option
from .lists import MOST
from .loop import History, TrainingPlan


@dataclass(frozen=True)
class TuningRecipe(Bounded):
    """How a model of `train_diffusion` is trained further."""

    tasks: tuple[str, ...] = option(DiffusionRecipe.tasks, "Tasks that the model of FOLDER learned.")
    letters: int = option(MOST, "Letters of the longest list.")
    steps: int = 1500
    batch: int = option(64, "Examples of a step.")
    lr: float = 2e-4
    control: bool = option(False, "Train a control: as long, on new examples alone.")
    seed: int = option(0, "Random seed of examples and masks.")

    @property
    def recipe(self) -> DiffusionRecipe:
        """What new examples are drawn by."""
        return DiffusionRecipe(self.tasks, self.letters, steps=self.steps, batch=self.batch, seed=self.seed)

    @property
    def plan(self) -> TrainingPlan:
        """How long it trains, and how fast."""
        return TrainingPlan(self.steps, lr=self.lr, betas=(0.9, 0.98))


@dataclass(frozen=True)
class DiffusionModel(Data):
    """A model of `decodery train diffusion`."""

    folder: Path = field(default=Path(), metadata={**ARGUMENT, "path": "folder"})


def tune(
    run: Run,
    model: Transformer,
    recipe: TuningRecipe,
    what: str,
    loss: Callable[[int], torch.Tensor] | None = None,
    held: Callable[[], torch.Tensor] | None = None,
) -> History:
    """Train a model of `train_diffusion` further and keep it in the folder of a run.

    Args:
        held: See `diffusion.learn`; that of new examples for the control.
    """

    def of_examples(count: int, number: int) -> torch.Tensor:
        return distance(model, Masked.draw(recipe.recipe, count, number))

    return learn(
        model,
        loss or (lambda step: of_examples(recipe.batch, step)),
        held or (lambda: of_examples(256, HELD)),
        recipe.plan,
        run.out,
        {**asdict(recipe), "before": model.fingerprint},
        run.progress,
        what,
    )


def report_of(run: Run, recipe: TuningRecipe) -> dict[str, Any]:
    """The report of a run's model, beside that of the model it began with."""
    return tested(run.out, recipe.recipe, trained(run.of(DiffusionModel).folder))
