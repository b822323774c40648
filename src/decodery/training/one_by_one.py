"""What trainers of small parts beside a model share: a text a step, one text in eight held out, the best step kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Generic, Protocol, TypeVar

import torch

from decodery.core.errors import PromptError

from .fitting import Fitted, fit
from .held_out import HeldOut
from .kind import Run
from .loop import TrainingPlan, batches, content

HELD = 8
"""One text in so many is held out."""

Example = TypeVar("Example", bound=Sized)


class TrainingRecipe(Protocol):
    """What every recipe says, a dataclass."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def seed(self) -> int: ...


class ExampleSplit(Generic[Example]):
    """Examples, by what a recipe says.

    Args:
        kind: What a run's settings and reports call the examples.
        least: How many tokens each has at least.
        known: Those that nothing is learned from.

    Raises:
        PromptError: For too few of them, or too short ones.
    """

    def __init__(
        self, examples: Sequence[Example], recipe: TrainingRecipe, kind: str = "texts", least: int = 1
    ) -> None:
        if len(examples) < HELD or min(map(len, examples)) < least:
            raise PromptError(
                f"{len(examples)} {kind} are too few or too short to learn from: give at least {HELD}, of {least} "
                "tokens or more"
            )
        self.recipe, self.kind = recipe, kind
        self.known = HeldOut.of(examples[HELD - 1 :: HELD])
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
    ) -> Fitted:
        """Train `tensors`, which become those of the best step, by the loss of an example in each step.

        Args:
            loss: Of an example in a step, counted from 0.
            figures: Of examples that were not learned from.
            data: All examples, as JSON writes them: checkpoints are gone on from where it is the same.
        """
        recipe = self.recipe
        order = batches(len(self._learned), 1, recipe.seed)
        return fit(
            run,
            self.known,
            tensors,
            lambda step: loss(self._learned[order(step)[0]], step),
            figures,
            TrainingPlan(
                recipe.steps, lr=recipe.lr, weight_decay=weight_decay, validate_every=max(1, recipe.steps // 6)
            ),
            metric=metric,
            unit=self.kind,
            settings={"recipe": vars(recipe), self.kind: content(data)},
            what=what,
        )


def as_ids(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Texts as JSON writes them."""
    return [[*map(int, text)] for text in texts]


def kept(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was learned, as a file keeps it."""
    return {name: each.detach().cpu() for name, each in tensors.items()}
