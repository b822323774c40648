"""Discrete-space consistency distillation: a student says of emptier canvases what its teacher says of fuller ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div

from decodery.core.errors import SettingsError
from decodery.models.torch.transformer import Transformer

from .diffusion import HELD, MODEL, logits_at, trained
from .diffusion_tuning import DiffusionModel, TuningRecipe, report_of, tune
from .kind import POSITIVE, Run, bounded, kind, option
from .lists import MASK, VOCABULARY, examples, ids
from .loop import History

_MOST_LOSS = 5.0


@dataclass(frozen=True)
class SelfDistillationRecipe(TuningRecipe):
    """How a diffusion model is distilled."""

    temperature: float = bounded(2.0, POSITIVE, "Temperature of both distributions.")
    first: float = bounded(0.9, "[0, 1]", "Weight of the consistency loss in the first tenth of the steps.")
    last: float = bounded(0.5, "[0, 1]", "Weight of the consistency loss at the end.")
    everywhere: bool = option(False, "Compare also the positions that are masked for the student alone, as published.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last > self.first:
            raise SettingsError(
                f"the share of consistency falls from first to last, not from {self.first} to {self.last}"
            )

    def share(self, step: int) -> float:
        """Of the consistency loss in the whole."""
        along = min(max((step / self.steps - 0.1) / 0.9, 0.0), 1.0)
        return self.last + (self.first - self.last) * (1 + cos(pi * along)) / 2


@dataclass(frozen=True)
class NestedMasks:
    """Examples masked twice.

    Attributes:
        student, teacher: [n, length] bool, the latter inside the former.
    """

    tokens: np.ndarray  # [n, length]
    student: np.ndarray
    teacher: np.ndarray

    @classmethod
    def draw(cls, settings: SelfDistillationRecipe, number: int) -> NestedMasks:
        """A function of the seed and a number alone."""
        recipe, draws = settings.recipe, np.random.default_rng([settings.seed, number, 1])
        drawn = examples(recipe.tasks, settings.batch, draws, recipe.letters)
        tokens, canvas = np.array([ids(each.prompt + each.canvas) for each in drawn]), recipe.canvas
        sizes = np.array([_sizes(canvas, draws) for _ in drawn])
        ranks = draws.random((len(drawn), canvas)).argsort(axis=1).argsort(axis=1)
        masks = []
        for column in range(2):
            mask = np.zeros(tokens.shape, dtype=bool)
            mask[:, recipe.prompt :] = ranks < sizes[:, column, None]
            masks.append(mask)
        return cls(tokens, *masks)

    def shown(self, mask: np.ndarray) -> np.ndarray:
        return np.where(mask, VOCABULARY.index(MASK), self.tokens)


def _sizes(places: int, draws: np.random.Generator) -> tuple[int, int]:
    """How many places of an answer the student and the teacher find masked."""
    if places <= 10:
        return min(2, places), 1
    share = draws.uniform(0.4, 0.9)
    share = min(share, 0.5) if places < 20 else share
    less = min(max(share * draws.uniform(0.3, 0.7), 0.1), 0.6)
    student = max(int(places * share), 2, -(-places // 10))
    return student, min(max(int(places * less), 1), student)


def losses(
    student: Transformer, teacher: Transformer, nested: NestedMasks, settings: SelfDistillationRecipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consistency with the teacher, and cross-entropy of the data, each in nats a place and at most 5."""
    places = torch.from_numpy(np.flatnonzero(nested.student))
    ours = logits_at(student, nested.shown(nested.student), places)
    data = cross_entropy(ours, torch.from_numpy(nested.tokens.reshape(-1))[places])
    with torch.no_grad():
        theirs = logits_at(teacher, nested.shown(nested.teacher), places)
    kept = torch.ones(len(places), dtype=torch.bool, device="cpu")
    if not settings.everywhere:
        kept = torch.from_numpy(nested.teacher.reshape(-1))[places]
    # Neither law has the mask token.
    words = [token for token in range(ours.shape[1]) if token != VOCABULARY.index(MASK)]
    warm = [(each[kept][:, words] / settings.temperature).log_softmax(dim=-1) for each in (ours, theirs)]
    consistency = settings.temperature**2 * kl_div(warm[0], warm[1], reduction="batchmean", log_target=True)
    return consistency.clamp(0, _MOST_LOSS), data.clamp(0, _MOST_LOSS)


def distil(run: Run) -> History:
    """Train a copy of the model of a run's folder, one of `train_diffusion`."""
    settings = run.of(SelfDistillationRecipe)
    student, teacher = (trained(run.of(DiffusionModel).folder) for _ in range(2))
    if settings.control:
        return tune(run, student, settings, "distilling")

    def weighed(nested: NestedMasks, share: float) -> torch.Tensor:
        consistency, data = losses(student, teacher, nested, settings)
        return share * consistency + (1 - share) * data

    return tune(
        *(run, student, settings, "distilling"),
        lambda step: weighed(NestedMasks.draw(settings, step), settings.share(step)),
        lambda: torch.stack([weighed(NestedMasks.draw(settings, HELD + n), settings.last) for n in range(4)]).mean(),
    )


@kind(
    "The model is ready: --model {out} --no-chat-template --diffuse cad",
    (DiffusionModel(), SelfDistillationRecipe()),
    "diffusion --out student",
    file=MODEL,
)
def _dscd(run: Run) -> dict[str, Any]:
    """Distil the diffusion model in FOLDER, which `decodery train diffusion` made (CD4LM).

    The student gets canvases with more masks than the teacher, and learns to predict the same.
    """
    distil(run)
    return report_of(run, run.of(SelfDistillationRecipe))
