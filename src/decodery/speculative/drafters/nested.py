"""Nested drafts: one small model with exits at several depths, which takes as many layers as each token asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import numpy as np
import torch

from decodery.core.errors import SettingMissing, SettingsError, UnsupportedModel
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.vocabularies import fitted
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.step.sequence import Sequence

from .follower import shared
from .writing import Writing

_CHUNK = 512
_MADE = "train one with `decodery train nested -m MODEL --out DIR`, and name it, as in nested:model=DIR"


@dataclass(slots=True)
class NestedReading:
    """What a model has read of a text up to each of its exits.

    Attributes:
        exits: Layers after which the head is asked, ascending.
        slots: See `Sequence`.
        tokens: The text that the layers below the first exit have read.
        waiting: After each exit but the last one the states [n, hidden] of the newest tokens, which the layers above it
            have not read yet: they do when a later token goes on there.
    """

    model: LanguageModel
    exits: tuple[int, ...]
    slots: int | None = None
    cache: KVCache = field(init=False)
    tokens: list[int] = field(default_factory=list)
    waiting: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget()

    def __deepcopy__(self, memo: dict[int, object]) -> NestedReading:
        clone = NestedReading(self.model, self.exits, self.slots)
        clone.cache, clone.tokens, clone.waiting = self.cache.fork(), list(self.tokens), list(self.waiting)
        return clone

    def forget(self) -> None:
        """Give back the cache's memory: all is read again where it is needed."""
        self.cache, self.tokens = self.model.new_cache(), []
        self.waiting = [torch.empty(0, self.model.config.hidden_size, dtype=torch.float32, device="cpu")] * (
            len(self.exits) - 1
        )
        if self.slots is not None:
            self.cache.provide(self.slots)

    def agree(self, tokens: list[int]) -> None:
        """Forget what is not text any more, and the last of `tokens`, whose logits are to be asked for."""
        kept = min(shared(tokens, self.tokens), len(tokens) - 1)
        self.cache.truncate(kept)
        del self.tokens[kept:]
        for number, (below, above) in enumerate(self._held()):
            self.waiting[number] = self.waiting[number][: below - above]

    def after(self, tokens: list[int], sure: tuple[float, ...]) -> ForwardCoroutine[torch.Tensor]:
        """The logits [1, vocab] after `tokens`, of which all read so far are the beginning.

        They are those of the first exit that gives its most likely token as much as `sure` says, else of the last one.
        """
        fresh = tokens[len(self.tokens) :]
        for start in range(0, len(fresh), _CHUNK):
            chunk = fresh[start : start + _CHUNK]
            last = start + len(chunk) == len(fresh)
            logits = yield from self._up(0, Segment.chunk(chunk, self.cache, [len(chunk) - 1] if last else []))
            self.tokens += chunk
        for level, threshold in zip(range(1, len(self.exits)), sure, strict=True):
            if float(logits[0].softmax(dim=-1).max()) >= threshold:
                break
            while len(states := self.waiting[level - 1]):
                rows, first = states[:_CHUNK], len(self.tokens) - len(states)
                asked = [len(rows) - 1] if len(rows) == len(states) else []
                positions = np.arange(first, first + len(rows))
                segment = Segment(positions, states=rows, cache=self.cache, logit_rows=asked)
                logits = yield from self._up(level, segment)
                self.waiting[level - 1] = states[len(rows) :]
        return logits

    def _up(self, level: int, segment: Segment) -> ForwardCoroutine[torch.Tensor]:
        """The logits after one exit of rows that come from the one before it."""
        bounds = (0, *self.exits)
        layers, leave = tuple(range(bounds[level], bounds[level + 1])), self.exits[level]
        taps = (leave,) if level < len(self.waiting) else ()
        (scored,) = yield [ForwardRequest(self.model, segment, taps, "draft", LayerPlan(layers))]
        self.cache.keep(range(len(segment)), layers)
        if taps:
            self.waiting[level] = torch.cat((self.waiting[level].to(scored.hidden[leave]), scored.hidden[leave]))
        count("draft layers", len(layers) * len(segment))
        return scored.logits

    def _held(self) -> Iterator[tuple[int, int]]:
        """How many tokens the layers right below and right above each exit but the last one hold."""
        return pairwise(int(self.cache.lengths[leave - 1]) for leave in self.exits)


@register(
    "nested",
    paper="S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large Language Models (2024)",
    lossless=True,
    requirements=("a draft model with exits, made by decodery train nested",),
)
@dataclass(frozen=True)
class Nested(Drafter):
    """Drafts with a nested small model and uses as many of its layers as each token needs.

    Layers above an exit read what was left for them together, when the next token comes by: what they then hold is what
    they would hold had every token gone all the way. How deep a token was drafted depends on what stands before it
    alone. Scope: the request; memory: one more cache, and a state for every token that left early. The thresholds are
    not published; the catching up is a choice made here.

    Attributes:
        model: A draft made by `decodery train nested`, whose first layers, under its one final norm and head, are
            drafts of their own; any target with its vocabulary may be drafted for.
        sure: The probability that an exit must give its most likely token for it to be taken there, one for all exits
            or one for each but the last.
        exits: The numbers of layers to choose from; () for those that the model was trained with, which have to be
            among the layers it has.
        length: Tokens of a draft.
        dtype: As in `draft-model`.
    """

    model: LanguageModel | str | None = None
    sure: tuple[float, ...] = (0.6,)
    exits: tuple[int, ...] = ()
    length: int = 4
    dtype: Precision = "auto"

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if self.length < 1 or not self.sure or not all(0 <= each <= 1 for each in self.sure):
            raise SettingsError("nested needs length >= 1, and sure between 0 and 1, one or several as in sure=0.7/0.5")
        if self.model is None:
            raise SettingMissing(f"nested has no draft model: {_MADE}")

    def largest(self) -> int:
        return self.length

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        assert self.model is not None
        return (named(self.model, self.dtype),)

    def held_rows(self, nodes: int) -> int:
        return 3

    def start(self, seq: Sequence) -> NestedReading:
        (own,) = self.auxiliary_models(seq.request.model)
        model = cast(LanguageModel, fitted(own, seq.request.model))
        if not model.capabilities.layer_plans:
            raise UnsupportedModel(f"this draft model cannot be left early: {_MADE}")
        exits, layers = self.exits or model.config.exits, model.config.num_layers
        if not exits:
            raise SettingsError(f"this draft model was trained for no exits: {_MADE}")
        if list(exits) != sorted(set(exits)) or not 0 < exits[0] <= exits[-1] <= layers:
            raise SettingsError(f"exits ascend from 1 to the {layers} layers of the draft model, not {exits}")
        if len(self.sure) not in (1, len(exits) - 1):
            raise SettingsError(f"nested needs one sure for all exits, or {len(exits) - 1} of them, not {self.sure}")
        return NestedReading(model, exits, seq.request.slots)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        reading: NestedReading = seq.states[self]
        room = reading.model.config.max_positions - len(seq.tokens) + 1
        most = min(self.length, budget.nodes, budget.depth, room)
        sure = self.sure if len(self.sure) > 1 else self.sure * (len(reading.exits) - 1)
        writing = Writing(seq)
        if most > 0:
            reading.agree(seq.tokens)
        while len(writing.drafted) < most and not writing.ended:
            logits = yield from reading.after(writing.seq.tokens, sure)
            writing.draw(logits[0])
        return writing.chain

    def more_for(self, seq: Sequence, tokens: int) -> int:
        reading: NestedReading = seq.states[self]
        return reading.cache.more_for(tokens)

    def forget(self, seq: Sequence) -> None:
        reading: NestedReading = seq.states[self]
        reading.forget()
