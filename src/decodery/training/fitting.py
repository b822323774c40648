"""One training of a part beside a model: one half of what is held out chooses its step, the other half is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from .held_out import HeldOut, Measured
from .kind import Run
from .loop import History, TrainingPlan, train

Item = TypeVar("Item")


@dataclass(frozen=True)
class Fitted:
    """What a training came to."""

    run: Run
    history: History
    report: dict[str, Any]

    def facts(self, recipe: Any, **more: Any) -> dict[str, Any]:
        """How the part was made, for its file."""
        made = {"model": self.run.model, "command": self.run.command, **more, "best_step": self.history.best_step}
        return made | {"validation": self.report, "recipe": asdict(recipe)}


def fit(
    run: Run,
    known: HeldOut[Item],
    parameters: Mapping[str, torch.Tensor],
    loss: Callable[[int], torch.Tensor],
    figures: Callable[[list[Item]], Mapping[str, float]],
    plan: TrainingPlan,
    *,
    metric: str = "loss",
    tested: str = "",
    weight: Callable[[Item], float] = lambda item: 1.0,
    unit: str = "texts",
    baseline: tuple[str, Callable[[list[Item]], Mapping[str, float]]] | None = None,
    **more: Any,
) -> Fitted:
    """Train `parameters`, which become those of the best step, going on from the checkpoint of a run.

    Args:
        tested: The figure that has an interval, `metric` by default.
        unit: What an item is, in the plural.
        baseline: What the report compares with, and figures of it; by default those before the training, "untrained".
    """

    def measured(of: Callable[[list[Item]], Mapping[str, float]]) -> Measured:
        with torch.no_grad():
            return known.measured(of, tested or metric, weight)

    name, compared = baseline or ("untrained", figures)
    before = measured(compared)
    history = train(
        *(parameters, loss, plan, run.training),
        validate=lambda: figures(known.choosing),
        metric=metric,
        progress=run.progress,
        **more,
    )
    return Fitted(run, history, known.report(measured(figures), {name: before}, unit))
