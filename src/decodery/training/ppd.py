"""Train the prompt tokens that `ppd` feeds, and count how often what the model expects there is right.

Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference (2024) cuts a text at one
random place and puts prompt tokens after it; here they are put after many of its places, each seeing the text up to
there and the prompt tokens of the same place before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from decodery.models.loaders.drafts import PROMPTS
from decodery.models.trained.placeholders import Placeholders

from .ahead import AheadRecipe, train_ahead
from .bounds import COUNT, bounded
from .corpus import Corpus
from .kind import Kind, Run
from .kind_data import OwnTexts, from_own_texts
from .lexical_units import PlaceholderTrainee
from .loop import History


@dataclass(frozen=True)
class PPDRecipe(AheadRecipe):
    """How prompt tokens learn.

    Attributes:
        ahead: Number of tokens to predict ahead.
        decay: Weight of a token, as a share of the weight of the one before it.
    """

    ahead: int = bounded(3, COUNT)
    decay: float = bounded(0.8, "(0, 1]")
    lr: float = 1e-2


def train_ppd(run: Run, corpus: Corpus) -> tuple[Placeholders, History]:
    """Train prompt tokens on texts that the model wrote, for `ppd`. Every ninth text is held out.

    Raises:
        SettingsError: For a model that is not in floating point, and for texts that teach nothing.
    """
    recipe = run.of(PPDRecipe)
    trainee = PlaceholderTrainee(run.loaded.model, run.learning, recipe, ahead=recipe.ahead, decay=recipe.decay)
    return train_ahead(run, corpus, trainee, recipe, trainee.made, what="training prompt tokens", file=PROMPTS)


KINDS = {
    "ppd": Kind(
        """Train prompt tokens that let MODEL predict further tokens: --drafter ppd:ppd=DIR. Only embeddings are
        trained.""",
        from_own_texts(train_ppd),
        "The prompt tokens are ready: --drafter ppd:ppd={out}",
        (OwnTexts(), PPDRecipe()),
        "--ahead 3 --out ppd",
        model="that drafts for itself",
        file=PROMPTS,
    )
}
