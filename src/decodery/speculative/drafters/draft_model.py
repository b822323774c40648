"""A second, smaller language model drafts a chain."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import torch

from decodery.compression.copies import copy_of
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.layer_plan import WHOLE
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.reduced_vocabulary import reduced
from decodery.models.tokenizers.vocabularies import fitted
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_policy import TreePolicy

from .follower import Follower
from .following import Following
from .own_layers import OwnReading


@register(
    "draft-model",
    paper="Fast Inference from Transformers via Speculative Decoding (2023)",
    lossless=True,
    slower=True,
    requirements=(
        "a second model with the same vocabulary, or the one that comes with the embedded model, which is too weak to "
        "pay: 23 to 27 % of its tokens are right",
    ),
)
@dataclass(frozen=True)
class DraftModel(Following):
    """Drafts with a smaller model of the same vocabulary, by the target's sampler.

    Draft tokens use the target's processors and the target's noise, so that under the coupled rule two models that
    agree draw the same token; where the rule wants them, the draft's distributions go along. Scope: the request;
    memory: one more cache, or what a draft takes.

    Attributes:
        model: A `LanguageModel`, or a name `decodery.load` knows; None is the draft that comes with this package for
            the target, as there is one for smollm2.
        dtype: What a named one is loaded in, such as "int4".
        transform: In place of a model, what is made of the target when the first text begins, such as "int4(bits=3)"
            (one that reads no text); the copy is kept as long as the target.
        recycled: Whether it reads of the text what the target has kept, where both keep keys and values of the same
            shape, as a transformed copy does: then it reads its own drafts alone, and has no cache.
        vocabulary: How many tokens the draft predicts, those with the lowest ids; None is all of them. A small draft
            spends much of a pass on its vocabulary projection, and most tokens of a text have low ids.
        length: Tokens of a chain.
        tree_policy: How trees are grown in place of it, such as "eagle-2(nodes=32)".
    """

    model: LanguageModel | str | None = None
    dtype: Precision = "auto"
    transform: str | None = None
    recycled: bool = False
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and self.transform is not None:
            raise SettingsError(
                "draft-model drafts with a model or with what a transform makes of the target: name one"
            )
        if self.vocabulary is not None and self.vocabulary < 1:
            raise SettingsError(f"draft-model needs vocabulary >= 1, not {self.vocabulary}")

    @property
    def requirements(self) -> Requirements:
        return (
            Requirements.merged((super().requirements, Requirements(keys=True)))
            if self.recycled
            else super().requirements
        )

    @property
    def provides(self) -> Provides:
        return replace(super().provides, draft_states=super().provides.pauses and not self.recycled)

    def start(self, seq: Sequence) -> Follower | OwnReading:
        model = self._model(seq.request.model)
        if isinstance(self.tree_policy, TreePolicy) and not model.capabilities.trees:
            raise UnsupportedModel("the draft model reads no rows that branch, as trees do: leave tree_policy out")
        if seq.request.draft_length is not None:
            seq.request.draft_length.fits(model)
        if self.recycled:
            return OwnReading(_alike(model, seq.request.model))
        tapped = seq.request.draft_length is not None and seq.request.draft_length.requirements.draft_states
        return Follower.begin(model, seq.request.model, tapped=tapped, slots=seq.request.slots)

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        reading = seq.states[self]
        if isinstance(reading, OwnReading):
            return reading.after(seq, tree, nodes, WHOLE)
        return super().logits(seq, tree, nodes)

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return () if self.recycled else (self._model(target),)

    def _model(self, target: Reader) -> Reader:
        if self.transform is not None:
            return reduced(copy_of(target, self.transform), self.vocabulary, "draft-model")
        model = named(_shipped(target) if self.model is None else self.model, self.dtype)
        return reduced(model, self.vocabulary, "draft-model")

    def state(self, seq: Sequence) -> torch.Tensor | None:
        reading = seq.states[self]
        return reading.hidden if isinstance(reading, Follower) else None


def _alike(model: Reader, target: Reader) -> Reader:
    """The model, where it can go on from what `target` keeps of a text. Raises SettingsError where it cannot."""

    def kept(each: Reader) -> tuple[object, ...]:
        config = each.config
        shape = config.cache_layers, config.num_kv_heads, config.head_dim, each.new_cache().pages.nothing.dtype
        return (*shape, config.rope, config.local_rope, config.sliding_window, config.sliding_layers)

    if kept(model) != kept(target):
        raise SettingsError(
            "this draft model keeps other keys and values than the target, and cannot go on from those: leave recycled "
            "out, or draft with a copy of the target, as in draft-model:transform=int8,recycled=true"
        )
    return fitted(model, target)


def _shipped(target: Reader) -> str:
    """The name of the draft that comes with this package for a model like `target`."""
    from decodery.models.loaders.drafts import shipped_for

    found = shipped_for(target.config.vocabulary)
    if found is None:
        raise SettingsError(
            "no draft model comes with this package for this model: train one with `decodery train draft -m MODEL "
            "--out DIR`, or name another, as in draft-model:model=NAME"
        )
    return found
