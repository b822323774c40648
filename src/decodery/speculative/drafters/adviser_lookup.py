"""The head or second model that `auto` takes where its settings leave the choice to it, and why there is none."""

from __future__ import annotations

from decodery.core.method_spec import is_untrusted
from decodery.models.loaders import drafts
from decodery.models.protocol import Reader, is_open

from ..heads.found import chosen_head
from ..heads.head import TrainedHead
from .found_models import FoundModel, chosen_model

FOUND = "found"


def second_for(model: Reader) -> tuple[FoundModel | None, list[str]]:
    """The second model for a model, and what there is to say of those that were found."""
    if is_untrusted():
        return None, ["drafting with n-grams: models are not looked for in requests from a network"]
    second, notes = chosen_model(model)
    return second, notes or ["drafting with n-grams: no smaller model was found that fits this one"]


def head_for(model: Reader, place: str, *, sourced: bool) -> tuple[TrainedHead | None, list[str]]:
    """The head for a model, and what there is to say of those that were found.

    Args:
        model: The model.
        place: "found" for one near the model, "shipped" for the one that comes along.
        sourced: Whether something else takes the place of what the model predicts.
    """
    if sourced or not is_open(model):
        # What a source shows in the model's place need not be what the head has learned to read.
        return None, ["drafting with n-grams: a head needs the states of the model itself"]
    if place == FOUND:
        if is_untrusted():
            return None, ["drafting with n-grams: heads are not looked for in requests from a network"]
        trained, notes = chosen_head(model)
        return trained, notes or ["drafting with n-grams: no head was found that fits this model"]
    path = drafts.shipped_head(drafts.HEAD, model.config.vocabulary)
    trained = None if path is None else TrainedHead.load(path)
    return trained, ["drafting with n-grams: no head comes along for this model"]
