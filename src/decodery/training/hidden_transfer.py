"""Train the maps of `hidden-transfer`, and count how often what the states they make come to is right.

Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration (2024): the state of a token after
some layer is made into one that stands for a token after it, and the layers above, which stay as they are, go on with
it. The maps learn what the model expects there once it knows the tokens between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Segment
from decodery.models.hooks import Intervention, Tap
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.drafts import TRANSFER
from decodery.models.protocol import LanguageModel
from decodery.models.trained.transfer import Transfer

from .ahead import AheadRecipe, AheadTrainee, after, train_ahead
from .corpus import Corpus
from .kind import Run, bounded, kind
from .kind_data import OwnTexts, own_texts, validation


@dataclass(frozen=True)
class TransferRecipe(AheadRecipe):
    """How maps learn.

    Attributes:
        layers: Layers after which each token ahead is predicted, in ascending order.
    """

    layers: tuple[int, ...] = (18, 21, 24)
    decay: float = bounded(1.0, "(0, 1]", "Weight of a token, as a share of the weight of the one before it.")
    lr: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or list(self.layers) != sorted(self.layers) or self.layers[0] < 0:
            raise SettingsError("hidden transfer needs layers in ascending order, one for each token that is predicted")


class TransferTrainee(AheadTrainee):
    """A trainee in which maps learn, which begin as identities."""

    def __init__(self, reader: LanguageModel, model: LanguageModel, recipe: TransferRecipe) -> None:
        layers = recipe.layers
        super().__init__(reader, model, ahead=len(layers), places=recipe.places, alpha=0.0, decay=recipe.decay)
        config = self.model.config
        if layers[-1] >= config.num_layers:
            raise SettingsError(f"the model has {config.num_layers} layers: transfer after fewer than that")
        self.layers, self.taps = layers, tuple(dict.fromkeys(layers))
        self.layer_plan = LayerPlan(tuple(range(layers[0], config.num_layers)))
        self.maps = torch.eye(config.hidden_size, device=self.model.device, dtype=torch.float32).repeat(
            len(layers), 1, 1
        )
        self.maps.requires_grad_(True)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {"maps": self.maps}

    def after(self, place: int, past: torch.Tensor, hidden: Mapping[Tap, torch.Tensor]) -> Segment:
        owners = torch.stack([hidden[layer][place] for layer in self.layers])
        made = torch.einsum("nij,nj->ni", self.maps.to(owners.dtype), owners)
        # Rows that are made further up go along until then, unseen by those before them.
        later = tuple(
            Intervention(layer, partial(_put, made=made, at=at))
            for layer in self.taps[1:]
            if (at := [number for number, own in enumerate(self.layers) if own == layer])
        )
        return after(made, place, past, interventions=later)


def _put(rows: torch.Tensor, segment: Segment, made: torch.Tensor, at: list[int]) -> torch.Tensor:
    changed = rows.clone()
    changed[at] = made[at].to(rows.dtype)
    return changed


def train_transfer(run: Run, corpus: Corpus) -> Transfer:
    """Train maps on texts that the model wrote, for `hidden-transfer`. Every ninth text is held out."""
    recipe, target = run.of(TransferRecipe), run.loaded.model
    trainee = TransferTrainee(target, run.learning, recipe)

    def made(facts: dict[str, Any], rates: torch.Tensor | None) -> Transfer:
        assert rates is not None
        return Transfer(trainee.maps.detach().cpu(), recipe.layers, rates, facts, target.fingerprint)

    return train_ahead(run, corpus, trainee, recipe, made, what="training maps", file=TRANSFER)


@kind(
    "The maps are ready: --drafter hidden-transfer:transfer={out}",
    (OwnTexts(), TransferRecipe(steps=600)),
    "--layers 18/21/24 --out maps",
    model="that drafts for itself",
    file=TRANSFER,
)
def _hidden_transfer(run: Run) -> Mapping[str, Any]:
    """Train maps from the hidden states of MODEL to those of later tokens: --drafter hidden-transfer:transfer=DIR.

    Only the maps are trained.
    """
    return validation(train_transfer(run, own_texts(run)))
