"""Train what stands in place of tokens that are not written yet: embeddings alone, while the model stays as it is.

Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs (2024) fine-tunes the model on
runs of tokens it is sure of, read as placeholders; here the placeholders of `lexical-unit` learn and nothing else does,
so that the model writes what it wrote before. Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration
of LLM Inference (2024) puts the prompt tokens of `ppd` after one random place of a text; here they stand after many,
each seeing the text up to there and the prompt tokens of the same place before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.drafts import PROMPTS, UNITS
from decodery.models.protocol import LanguageModel
from decodery.models.trained.placeholders import Placeholders

from .ahead import AheadRecipe, AheadTrainee, after, train_ahead
from .corpus import Corpus
from .kind import COUNT, Run, bounded, kind
from .kind_data import OwnTexts, own_texts, validation


@dataclass(frozen=True)
class UnitsRecipe(AheadRecipe):
    """How placeholders learn; there are few numbers to learn, so that one text per step is enough."""

    span: int = bounded(4, "[2, inf)", "Maximum tokens of a unit. The first of them needs no placeholder.")
    alpha: float = bounded(0.5, "[0, 1]", "Minimum probability of the tokens that are learned. 0: learn all.")


@dataclass(frozen=True)
class PPDRecipe(AheadRecipe):
    """How prompt tokens learn."""

    ahead: int = bounded(3, COUNT, "Number of tokens to predict ahead.")
    decay: float = bounded(0.8, "(0, 1]", "Weight of a token, as a share of the weight of the one before it.")
    lr: float = 1e-2


class PlaceholderTrainee(AheadTrainee):
    """A trainee in which embeddings learn that stand for the tokens after a place."""

    def __init__(
        self,
        reader: LanguageModel,
        model: LanguageModel,
        recipe: AheadRecipe,
        *,
        ahead: int,
        alpha: float = 0.0,
        decay: float = 1.0,
    ) -> None:
        super().__init__(reader, model, ahead=ahead, places=recipe.places, alpha=alpha, decay=decay)
        mean = self.model.weights.embedding.float().mean(dim=0)
        self.placeholders = mean.repeat(ahead, 1).requires_grad_(True)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {"placeholders": self.placeholders}

    def made(self, facts: dict[str, Any], rates: torch.Tensor | None) -> Placeholders:
        """What was learned, as it is kept."""
        return Placeholders(self.placeholders.detach().cpu(), facts, rates)

    def after(self, place: int, past: torch.Tensor, hidden: Mapping[Tap, torch.Tensor]) -> Segment:
        return after(self.placeholders, place, past)


def train_units(run: Run, corpus: Corpus) -> Placeholders:
    """Train placeholders on texts that the model wrote, for `lexical-unit`.

    Every twentieth text is held out.
    """
    recipe = run.of(UnitsRecipe)
    trainee = PlaceholderTrainee(run.loaded.model, run.learning, recipe, ahead=recipe.span - 1, alpha=recipe.alpha)
    how: dict[str, Any] = {"what": "training placeholders", "file": UNITS, "every": 20, "rated": False}
    return train_ahead(run, corpus, trainee, recipe, trainee.made, **how)


def train_ppd(run: Run, corpus: Corpus) -> Placeholders:
    """Train prompt tokens on texts that the model wrote, for `ppd`. Every ninth text is held out."""
    recipe = run.of(PPDRecipe)
    trainee = PlaceholderTrainee(run.loaded.model, run.learning, recipe, ahead=recipe.ahead, decay=recipe.decay)
    return train_ahead(run, corpus, trainee, recipe, trainee.made, what="training prompt tokens", file=PROMPTS)


@kind(
    "The placeholders are ready: --drafter lexical-unit:units={out}",
    (OwnTexts(), UnitsRecipe()),
    "-m smollm2 --out units",
    model="to train for",
    file=UNITS,
)
def _lexical_units(run: Run) -> Mapping[str, Any]:
    """Train placeholders that MODEL reads in place of unwritten tokens: --drafter lexical-unit:units=DIR.

    Only the placeholders are trained.
    """
    return validation(train_units(run, own_texts(run)))


@kind(
    "The prompt tokens are ready: --drafter ppd:ppd={out}",
    (OwnTexts(), PPDRecipe()),
    "--ahead 3 --out ppd",
    model="that drafts for itself",
    file=PROMPTS,
)
def _ppd(run: Run) -> Mapping[str, Any]:
    """Train prompt tokens that let MODEL predict further tokens: --drafter ppd:ppd=DIR.

    Only embeddings are trained.
    """
    return validation(train_ppd(run, own_texts(run)))
