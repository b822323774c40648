"""Train a model of `train_diffusion` further: what its kinds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer

from .diffusion import HELD, DiffusionRecipe, Masked, distance, parameters
from .kind import Data
from .kind_data import ARGUMENT
from .lists import MOST
from .llada_folder import write_llada
from .loop import History, TrainingPlan, train


@dataclass(frozen=True)
class TuningRecipe:
    """How a model of `train_diffusion` is trained further.

    Attributes:
        tasks: Tasks that the model of FOLDER learned.
        letters: Letters of the longest list.
        batch: Examples of a step.
        control: Train a control: as long, on new examples alone.
        seed: Random seed of examples and masks.
    """

    tasks: tuple[str, ...] = DiffusionRecipe.tasks
    letters: int = MOST
    steps: int = 1500
    batch: int = 64
    lr: float = 2e-4
    control: bool = False
    seed: int = 0

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
    """A model of `decodery train diffusion`.

    Attributes:
        folder: Its folder.
    """

    NOTE = "Interrupt it with Ctrl-C: the same command continues."

    folder: Path = field(default=Path(), metadata={**ARGUMENT, "path": "folder"})


def tune(
    model: Transformer,
    loss: Callable[[int], torch.Tensor],
    held: Callable[[], torch.Tensor],
    plan: TrainingPlan,
    out: Path,
    *,
    settings: Mapping[str, Any],
    progress: Progress,
    what: str,
) -> History:
    """Train a model of `train_diffusion` further and keep it in `out`; called again, it goes on there.

    Args:
        held: The loss of what training does not see, the least of which tells what model is kept. It has to be of the
            kind that is trained on: by another one the model that training begins with may well stay the best.
    """
    history = train(
        parameters(model), loss, plan, out / "training",
        validate=lambda: {"loss": float(held())}, metric="loss", settings=settings, progress=progress, what=what,
    )  # fmt: skip
    write_llada(model, out)
    return history


def held_back(model: Transformer, recipe: DiffusionRecipe) -> torch.Tensor:
    """`distance` on examples that no training sees."""
    return distance(model, Masked.draw(recipe, 256, HELD))
