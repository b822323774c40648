"""Train the prompt tokens that `ppd` feeds, and count how often what the model expects there is right.

Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference (2024) cuts a text at one
random place and puts prompt tokens after it; here they are put after many of its places, each seeing the text up to
there and the prompt tokens of the same place before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decodery.core.errors import SettingsError
from decodery.models.loaders.drafts import PROMPTS
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.trained.placeholders import Placeholders

from .ahead import AheadPart, AheadRecipe, train_ahead
from .card import check_of
from .corpus import Corpus
from .kind import Kind
from .kind_data import OwnTexts, from_own_texts
from .lexical_units import PlaceholderTrainee
from .loop import History

check_folder = check_of(PROMPTS, "holds no prompt tokens")


@dataclass(frozen=True)
class PPDRecipe(AheadRecipe):
    """How prompt tokens learn.

    Attributes:
        ahead: Number of tokens to predict ahead.
        decay: Weight of a token, as a share of the weight of the one before it.
    """

    ahead: int = 3
    decay: float = 0.8
    lr: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead < 1 or not 0 < self.decay <= 1:
            raise SettingsError("prompt decoding needs at least one prompt token, and a decay above 0 and at most 1")


def train_ppd(
    target: LoadedModel,
    model: LanguageModel,
    corpus: Corpus,
    out: Path,
    *,
    recipe: PPDRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> tuple[Placeholders, History]:
    """Train prompt tokens for `target` on texts it wrote and write them to `out`, for `ppd`.

    Interrupted, it goes on from its last checkpoint in `out` when called again.

    Args:
        model: The same one in floating point, through which gradients go.
        corpus: See `data.write_texts`, of which every ninth text is held out.

    Raises:
        SettingsError: For a model that is not in floating point, and for texts that teach nothing.
    """
    recipe = recipe or PPDRecipe()
    check_folder(out)
    trainee = PlaceholderTrainee(target.model, model, recipe, ahead=recipe.ahead, decay=recipe.decay)
    about = (
        f"{recipe.ahead} input embeddings that {target.name} reads in place of tokens that are not written yet "
        "(Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference, 2024)."
    )
    return train_ahead(
        *(target, corpus, out, trainee, recipe),
        AheadPart("training prompt tokens", PROMPTS, "Prompt tokens", "ppd:ppd", about),
        trainee.made,
        command,
        progress,
    )


KINDS = {
    "ppd": Kind(
        """Train prompt tokens that let MODEL predict further tokens: --drafter ppd:ppd=DIR. Only embeddings are
        trained.""",
        from_own_texts(train_ppd, PPDRecipe, floating=True),
        "The prompt tokens are ready: --drafter ppd:ppd={out}",
        (OwnTexts(), PPDRecipe()),
        "--ahead 3 --out ppd",
        model="that drafts for itself",
        check=check_folder,
    )
}
