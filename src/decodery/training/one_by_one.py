"""What trainers of small parts beside a model share: a text a step, one text in eight held out, the best step kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from decodery.core.errors import PromptError

from .held_out import HeldOut
from .kind import Run
from .loop import History, TrainingPlan, batches, content, train

HELD = 8
"""One text in so many is held out."""

Example = TypeVar("Example")


class TrainingRecipe(Protocol):
    """What every recipe says, a dataclass."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def seed(self) -> int: ...


def long_enough(texts: Sequence[Sequence[int]], least: int) -> None:
    """Raise PromptError for too few texts, or for one of fewer than `least` tokens."""
    if len(texts) < HELD or min(map(len, texts)) < least:
        raise PromptError(
            f"{len(texts)} texts are too few or too short to learn from: give at least {HELD}, of {least} tokens or "
            "more"
        )


class ExampleSplit(Generic[Example]):
    """Examples, by what a recipe says.

    Args:
        kind: What a run's settings and facts call the examples.
        held: Those that nothing is learned from, which choose the best step unless there are others.

    Raises:
        PromptError: For too few of them.
    """

    def __init__(self, examples: Sequence[Example], recipe: TrainingRecipe, kind: str = "texts") -> None:
        if len(examples) < HELD:
            raise PromptError(f"{len(examples)} {kind} are too few to learn from: give at least {HELD}")
        self.recipe, self.kind, self.count = recipe, kind, len(examples)
        self.known = HeldOut.of(examples[HELD - 1 :: HELD])
        self.held = self.known.choosing
        self._learned = [each for number, each in enumerate(examples) if number % HELD != HELD - 1]

    def learn(
        self,
        tensors: Mapping[str, torch.Tensor],
        loss: Callable[[Example, int], torch.Tensor],
        figures: Callable[[Sequence[Example]], dict[str, float]],
        run: Run,
        *,
        data: object,
        what: str,
        metric: str = "loss",
        weight_decay: float = 0.0,
    ) -> History:
        """Train `tensors`, which become those of the best step, by the loss of an example in each step.

        Args:
            loss: Of an example in a step, counted from 0.
            figures: Of examples that were not learned from.
            data: All examples, as JSON writes them: checkpoints are gone on from where it is the same.
        """
        recipe, before = self.recipe, self.known.measured(figures, metric)
        order = batches(len(self._learned), 1, recipe.seed)
        history = train(
            tensors,
            lambda step: loss(self._learned[order(step)[0]], step),
            TrainingPlan(
                recipe.steps, lr=recipe.lr, weight_decay=weight_decay, validate_every=max(1, recipe.steps // 6)
            ),
            run.training,
            validate=lambda: figures(self.held),
            metric=metric,
            settings={"recipe": vars(recipe), self.kind: content(data)},
            progress=run.progress,
            what=what,
        )
        self.report = self.known.report(self.known.measured(figures, metric), {"untrained": before}, self.kind)
        return history

    def facts(self, command: str, history: History, **figures: Any) -> dict[str, Any]:
        """How a part was made, for its file."""
        about = {"command": command, self.kind: self.count, "best_step": history.best_step}
        return about | {"validation": self.report} | figures | {"recipe": dict(vars(self.recipe))}


def as_ids(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Texts as JSON writes them."""
    return [[*map(int, text)] for text in texts]


def kept(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was learned, as a file keeps it."""
    return {name: each.detach().cpu() for name, each in tensors.items()}
