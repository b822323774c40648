"""A second, smaller language model drafts a chain."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..core.needs import Gives
from ..core.sequence import Sequence
from ..errors import SettingsError, UnsupportedModel
from ..model.named import Precision, named
from ..model.protocol import LanguageModel, Reader
from ..registry import register
from ..transform.copies import copy_of
from .follower import Follower
from .following import Following
from .growth.base import Growth


@register(
    "draft-model",
    paper="Fast Inference from Transformers via Speculative Decoding (2023)",
    lossless=True,
    needs=("a second model with the same vocabulary, or the one that comes with the target",),
)
@dataclass(frozen=True)
class DraftModel(Following):
    """Lets a smaller model with the same vocabulary write the next few tokens as the target's sampler would.

    model: a `LanguageModel`, or a name `decodery.load` knows; None is the draft that comes with this package for the
    target, as there is one for smollm2. dtype: what a named one is loaded in, such as "int4". transform: in place of a
    model, what is made of the target when the first text begins, such as "int4(bits=3)" (one that reads no text); the
    copy is kept as long as the target. length: tokens of a chain. growth: how trees are grown in place of it, such as
    "eagle-2(nodes=32)". Draft tokens use the target's warps and the target's noise, so that under the coupled rule two
    models that agree draw the same token; where the rule wants them, the draft's distributions go along. Scope: the
    request; memory: one more cache.
    """

    model: LanguageModel | str | None = None
    dtype: Precision = "auto"
    transform: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and self.transform is not None:
            raise SettingsError(
                "draft-model drafts with a model or with what a transform makes of the target: name one"
            )

    @property
    def gives(self) -> Gives:
        return replace(super().gives, draft_states=super().gives.pauses)

    def start(self, seq: Sequence) -> Follower:
        model = self._model(seq.model)
        if isinstance(self.growth, Growth) and not model.capabilities.trees:
            raise UnsupportedModel("the draft model reads no rows that branch, as trees do: leave growth out")
        if seq.budget is not None:
            seq.budget.fits(model)
        tapped = seq.budget is not None and seq.budget.needs.draft_states
        return Follower.begin(model, seq.model, tapped=tapped, slots=seq.slots)

    def readers(self, target: Reader) -> tuple[Reader, ...]:
        return (self._model(target),)

    def _model(self, target: Reader) -> Reader:
        if self.transform is not None:
            return copy_of(target, self.transform)
        return named(_shipped(target) if self.model is None else self.model, self.dtype)

    def state(self, seq: Sequence) -> torch.Tensor | None:
        reading: Follower = seq.draft_state
        return reading.hidden


def _shipped(target: Reader) -> str:
    """The name of the draft that comes with this package for a model like `target`."""
    from ..model.drafts import shipped_for

    found = shipped_for(target.config.vocabulary)
    if found is None:
        raise SettingsError(
            "no draft model comes with this package for this model: train one with `decodery train draft`, or name "
            "another, as in draft-model:model=NAME"
        )
    return found
