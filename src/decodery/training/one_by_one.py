"""The training of small parts beside a model: an example a step, one in eight held out, the best step kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from decodery.core.abstract import Contract
from decodery.core.errors import PromptError, SettingsError
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.artifact import TrainedPart

from .fitting import fit
from .held_out import HeldOut
from .kind import POSITIVE, Bounded, Run, bounded, option
from .kind_data import TextFiles, shown
from .loop import TrainingPlan, batches, content
from .traced import differentiable

HELD = 8
"""One example in so many is held out."""


class TrainingRecipe(Protocol):
    """What every recipe of such a part says. It is a dataclass."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def seed(self) -> int: ...


COLD = "Temperature of the choice at last."


@dataclass(frozen=True)
class CoolingRecipe(Bounded):
    """Base of recipes of a random choice that becomes surer with every step."""

    steps: int = 300
    hot: float = option(1.0, "Temperature of the choice at first.")
    cold: float = bounded(0.1, POSITIVE, COLD)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cold > self.hot:
            raise SettingsError(f"the choice cools down from hot to cold, not from {self.hot} to {self.cold}")

    def temperature(self, step: int) -> float:
        """That of a step."""
        return self.hot * (self.cold / self.hot) ** (step / max(1, self.steps - 1))


Example = TypeVar("Example", bound=Sized)
Part = TypeVar("Part", bound=TrainedPart)
Recipe = TypeVar("Recipe", bound=TrainingRecipe)


class PartTrainee(Contract, Generic[Example, Part, Recipe]):
    """A model that stays as it is, and what learns beside it.

    Attributes:
        METRIC: The figure that chooses the best step.
        least: How many tokens an example has at least.
    """

    NAME: ClassVar[str]
    PART: ClassVar[Callable[..., Any]]
    EXAMPLES: ClassVar[str] = "texts"
    METRIC: ClassVar[str] = "loss"
    WEIGHT_DECAY: ClassVar[float] = 0.0
    least: int = 1
    tensors: dict[str, torch.Tensor]

    def __init__(self, target: LoadedModel, recipe: Recipe) -> None:
        self.model, self.recipe = differentiable(target.model, self.NAME), recipe

    def learns(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let tensors learn, where the model is."""
        self.tensors = {name: each.to(self.model.device).requires_grad_(True) for name, each in tensors.items()}

    @abstractmethod
    def loss(self, example: Example, step: int | None = None) -> torch.Tensor:
        """What is minimised.

        Args:
            step: Of training, None for an example that is held out.
        """

    @torch.no_grad()
    def figures(self, examples: Sequence[Example]) -> dict[str, float]:
        """Figures of examples that were not learned from, by default their mean loss."""
        return {self.METRIC: float(torch.stack([self.loss(each) for each in examples]).mean())}

    def part(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any], examples: Sequence[Example]) -> Part:
        """What was learned, as it is kept."""
        return self.PART(tensors, facts, self.model.fingerprint)

    def about(self, tested: list[Example]) -> dict[str, Any]:
        """More facts, of examples that chose nothing."""
        return {}

    def data(self, examples: Sequence[Any]) -> object:
        """Examples as JSON writes them: checkpoints are gone on from where they are the same."""
        return as_ids(examples)


def train_beside(run: Run, trainee: PartTrainee[Example, Part, Recipe], examples: Sequence[Example]) -> Part:
    """Train a part beside a model, and leave it in the folder of a run. One example in eight is held out."""
    kind, least, recipe = trainee.EXAMPLES, trainee.least, trainee.recipe
    if len(examples) < HELD or min(map(len, examples)) < least:
        raise PromptError(
            f"{len(examples)} {kind} are too few or too short to learn from: give at least {HELD}, of {least} tokens "
            "or more"
        )
    known = HeldOut.of(examples[HELD - 1 :: HELD])
    learned = [each for number, each in enumerate(examples) if number % HELD != HELD - 1]
    order, every = batches(len(learned), 1, recipe.seed), max(1, recipe.steps // 6)
    fitted = fit(
        run,
        known,
        trainee.tensors,
        lambda step: trainee.loss(learned[order(step)[0]], step),
        trainee.figures,
        TrainingPlan(recipe.steps, lr=recipe.lr, weight_decay=trainee.WEIGHT_DECAY, validate_every=every),
        metric=trainee.METRIC,
        unit=kind,
        settings={"recipe": vars(recipe), kind: content(trainee.data(examples))},
        what=f"training {trainee.NAME}",
    )
    facts = fitted.facts(recipe, **{kind: len(examples)}, **trainee.about(known.tested))
    found = trainee.part({name: each.detach().cpu() for name, each in trainee.tensors.items()}, facts, examples)
    found.save(run.out / found.FILE)
    return found


def from_pieces(run: Run, trainee: type[PartTrainee[Any, Any, Recipe]], recipe: type[Recipe]) -> dict[str, Any]:
    """Train a part beside a model in floating point on pieces of text files."""
    learning = trainee(run.floating, run.of(recipe))
    return shown(train_beside(run, learning, run.of(TextFiles).pieces(run.floating)).facts)


def as_ids(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Texts as JSON writes them."""
    return [[*map(int, text)] for text in texts]
