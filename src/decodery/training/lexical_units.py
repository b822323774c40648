"""Train the placeholders that `lexical-unit` feeds: their embeddings alone, while the model stays as it is.

Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs (2024) fine-tunes the model on
runs of tokens it is sure of, read as placeholders. Here the placeholders learn and nothing else does, so that the model
writes what it wrote before. A text is read once, and placeholders are put after many of its places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.drafts import UNITS
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.trained.placeholders import Placeholders

from .ahead import AheadPart, AheadRecipe, AheadTrainee, after, train_ahead
from .card import check_of
from .corpus import Corpus
from .kind import Kind
from .kind_data import OwnTexts, from_own_texts
from .loop import History

check_folder = check_of(UNITS, "holds no units")


@dataclass(frozen=True)
class UnitsRecipe(AheadRecipe):
    """How placeholders learn; there are few numbers to learn, so that one text per step is enough.

    Attributes:
        span: Maximum tokens of a unit. The first of them needs no placeholder.
        alpha: Minimum probability of the tokens that are learned. 0: learn all.
    """

    span: int = 4
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span < 2 or not 0 <= self.alpha <= 1:
            raise SettingsError("units need a span of at least 2 and an alpha from 0 to 1")


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


def train_units(
    target: LoadedModel,
    model: LanguageModel,
    corpus: Corpus,
    out: Path,
    *,
    recipe: UnitsRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> tuple[Placeholders, History]:
    """Train placeholders for `target` on texts it wrote and write them to `out`, for `lexical-unit`.

    Interrupted, it goes on from its last checkpoint in `out` when called again.

    Args:
        model: The same one in floating point, through which gradients go.
        corpus: See `data.write_texts`, of which every twentieth text is held out.

    Raises:
        SettingsError: For a model that is not in floating point, and for texts that teach nothing.
    """
    recipe = recipe or UnitsRecipe()
    check_folder(out)
    trainee = PlaceholderTrainee(target.model, model, recipe, ahead=recipe.span - 1, alpha=recipe.alpha)
    about = (
        f"{recipe.span - 1} input embeddings that {target.name} reads in place of tokens that are not written yet "
        "(Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs, 2024)."
    )
    kept: dict[str, Any] = {"every": 20, "alpha": recipe.alpha, "rated": False}
    return train_ahead(
        *(target, corpus, out, trainee, recipe),
        AheadPart("training placeholders", UNITS, "Placeholders", "lexical-unit:units", about, **kept),
        trainee.made,
        command,
        progress,
    )


KINDS = {
    "lexical-units": Kind(
        """Train placeholders that MODEL reads in place of unwritten tokens: --drafter lexical-unit:units=DIR.

        Only the placeholders are trained.""",
        from_own_texts(train_units, UnitsRecipe, floating=True),
        "The placeholders are ready: --drafter lexical-unit:units={out}",
        (OwnTexts(), UnitsRecipe()),
        "-m smollm2 --out units",
        model="to train for",
        check=check_folder,
    )
}
