"""Two models that are to read one text: whether their tokens are the same, and how one reads the other's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.functional import pad

from decodery.core.errors import VocabularyMismatch

from ..batch import Batch, Scores, Segment
from ..cache.own_caches import bare
from ..config import ModelConfig
from ..hooks import Tap
from ..layer_plan import WHOLE, LayerPlan
from ..over_model import OverModel
from ..protocol import Capabilities, LanguageModel, Reader
from ..reduced_vocabulary import whole

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

R = TypeVar("R", bound=Reader)
_SHARE = "use models that share one tokenizer"
_spoken: WeakKeyDictionary[LanguageModel, Tokenizer] = WeakKeyDictionary()
"""What tells the tokens of the models in this process, as long as they are there."""


def speaks(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Remember what the tokens of a model stand for."""
    _spoken[model] = tokenizer


@dataclass(frozen=True, eq=False)
class Padding:
    """Ids that no token stands for, which nothing may draw: rows that a vocabulary was padded with.

    Attributes:
        first: The id from which on none is a token.
        others: [n] int64, those below it.
    """

    first: int
    others: np.ndarray

    def holds(self, id: int) -> bool:
        """Whether an id is one of them."""
        return id >= self.first or bool((self.others == id).any())

    def exclude(self, logits: torch.Tensor) -> torch.Tensor:
        """Make minus infinity of them.

        Args:
            logits: [..., vocab], which are written to.

        Returns:
            The same tensor.
        """
        logits[..., self.first :] = -torch.inf
        if len(self.others):
            logits[..., torch.from_numpy(self.others).to(logits.device, non_blocking=True)] = -torch.inf
        return logits


def padding_of(model: Reader) -> Padding | None:
    """The ids of a model that no token stands for.

    Args:
        model: a model whose tokenizer is known, as that of every loaded one is.

    Returns:
        None where all of them are tokens, or where nothing is known of them.
    """
    found = tokenizer_of(bare(model))
    return None if found is None else _padding(found, model.vocab_size)


def excluded(model: Reader, logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., vocab], changed in place, without ids that are no token; for code without a `Sequence`.

    Args:
        model: whose tokenizer is known.
        logits: its logits.

    Returns:
        The same tensor.
    """
    padding = padding_of(model)
    return logits if padding is None else padding.exclude(logits)


@lru_cache(maxsize=16)
def _padding(tokenizer: Tokenizer, size: int) -> Padding | None:
    missing = tokenizer.unknown(size)
    if not len(missing):
        return None
    tail = int((missing[::-1] == size - 1 - np.arange(len(missing))).cumprod().sum())
    return Padding(size - tail, missing[: len(missing) - tail])


def fitted(model: R, target: Reader) -> R | Fitted:
    """`model` for the texts of `target`, padded to as many tokens where needed.

    Raises:
        VocabularyMismatch: With the first token that is not the same in both where that is known.
    """
    sizes = model.vocab_size, target.vocab_size
    names = model.config.vocabulary, target.config.vocabulary
    if names[0] != names[1] or not names[0]:
        ours, theirs = tokenizer_of(model), tokenizer_of(target)
        if ours is not None and theirs is not None:
            _compare(ours, theirs, min(sizes))
        elif all(names):
            raise VocabularyMismatch(f"the tokens of the two models differ, although there may be as many: {_SHARE}")
        elif sizes[0] != sizes[1]:
            raise VocabularyMismatch(
                f"one model has {sizes[0]} tokens and the other {sizes[1]}, and what they are is unknown: {_SHARE}"
            )
    return model if sizes[0] == sizes[1] else Fitted(cast(LanguageModel, model), sizes[1])


@dataclass(frozen=True)
class Fitted(OverModel):
    """A model that has as many tokens as another one with the same tokenizer.

    What it lacks itself it reads as another token and never expects; what the other one lacks it never says.
    """

    model: LanguageModel
    vocab_size: int

    @cached_property
    def config(self) -> ModelConfig:
        return replace(self.model.config, vocab_size=self.vocab_size)

    @property
    def capabilities(self) -> Capabilities:
        own = self.model.capabilities
        return Capabilities(
            exact_rows=own.exact_rows,
            trees=own.trees,
            layer_plans=own.layer_plans,
            chosen=own.chosen,
            visible=own.visible,
        )

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel`."""
        scores = self.model.forward(
            Batch([self._readable(each) for each in batch.segments]), taps=taps, layer_plan=layer_plan
        )
        missing = self.vocab_size - self.model.vocab_size
        logits = scores.logits[:, : self.vocab_size].contiguous()
        return replace(scores, logits=pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits)

    def _readable(self, segment: Segment) -> Segment:
        """The same rows, in tokens that the model has."""
        # Any token would do: no text that the tokenizer makes holds what stands here.
        stand_in = (*self.model.config.eos_ids, 0)[0]
        if (chosen := segment.chosen) is not None and self.vocab_size > self.model.vocab_size:
            segment = replace(segment, chosen=chosen.masked_fill(chosen >= self.model.vocab_size, stand_in))
        if segment.tokens is None or (segment.tokens < self.model.vocab_size).all():
            return segment
        return replace(segment, tokens=np.where(segment.tokens < self.model.vocab_size, segment.tokens, stand_in))


def tokenizer_of(model: Reader) -> Tokenizer | None:
    """The tokenizer of a model: its own, else that of a model with the same vocabulary, or None."""
    known, name = list(_spoken.items()), model.config.vocabulary
    model = whole(model)
    own = next((tokenizer for each, tokenizer in known if each is model), None)
    return own or next((tokenizer for each, tokenizer in known if name and each.config.vocabulary == name), None)


@lru_cache(maxsize=8)
def _compare(ours: Tokenizer, theirs: Tokenizer, count: int) -> None:
    """Raise VocabularyMismatch where one of the first `count` tokens stands for one text here and for another there."""
    for id in range(count):
        pieces = ours.piece(id), theirs.piece(id)
        if all(pieces) and pieces[0] != pieces[1]:
            here, there = (piece.decode("utf-8", "replace") for piece in pieces)
            raise VocabularyMismatch(f"token {id} is {here!r} to one model and {there!r} to the other: {_SHARE}")
