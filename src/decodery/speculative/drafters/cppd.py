"""CPPD: a decoder without order says a whole short text at once, of what the encoder has read, and it is verified."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, cast

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.models.trained.slots import Slots
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.encoded import encoded
from decodery.step.forward_request import ForwardCoroutine, OfOneModel
from decodery.step.logits_source import LogitsSource
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter


class Drafted(NamedTuple):
    """What one pass says of its slots.

    Attributes:
        logits: [slots, v] of the tokens that slots can say.
        length: Slots up to the first that says the text ends.
    """

    logits: torch.Tensor
    length: int


@register(
    "cppd",
    paper="Context Perception Parallel Decoder for Scene Text Recognition (2023)",
    lossless=True,
    requirements=("slots made by decodery train cppd for a model of an encoder and a decoder",),
)
@dataclass(frozen=True)
class CPPD(TreeDrafter):
    """Drafts all of a short text at once, each token by its place alone, from what the encoder has read.

    One pass of the slots per text, when it begins; nothing is drafted after the first slot that expects the end. After
    a rejection the same slots go on at their places: they are right again where a token was mistaken for another, and
    wrong to the end where one is missing. Scope: the request; memory: a row for every slot. Published is the slots' own
    text as the answer, of images; here they draft, and the decoder has the last word.

    Attributes:
        slots: The file or folder that `decodery train cppd` made, or `Slots`.
        length: Tokens of a draft at most.
    """

    slots: Slots | str | None = None
    length: int = field(default=25, kw_only=True)

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged((super().requirements, Requirements(source=True)))

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        if self.slots is None:
            raise SettingsError(
                "no slots come along: make some with `decodery train cppd SOURCES -m MODEL --out DIR` and name "
                "them, as in cppd:slots=DIR"
            )
        return replace(self, slots=Slots.load(self.slots))

    def start(self, seq: Sequence) -> Drafted | None:
        self._slots.check(_target(seq))
        return None

    @property
    def _slots(self) -> Slots:
        assert isinstance(self.slots, Slots)
        return self.slots

    def reach(self, seq: Sequence) -> int:
        drafted: Drafted = seq.states[self]
        return min(seq.remaining, drafted.length - _place(seq))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        if seq.states[self] is None:
            assert seq.request.logits_source is not None
            memory = yield from encoded(_target(seq), seq.request.logits_source.read, seq.cache)
            with torch.no_grad():
                logits = self._slots.say(memory.states[None].float().cpu()).logits[0]
            seq.states[self] = Drafted(logits.to(seq.request.model.device), self._slots.end(logits))
        return (yield from super().propose(seq, budget))

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        drafted: Drafted = seq.states[self]
        rows = drafted.logits[_place(seq) + tree.depths[list(nodes)]]
        spread = rows.new_full((len(nodes), seq.request.vocab_size), -torch.inf)
        spread[:, self._slots.tokens] = rows
        return spread


def _place(seq: Sequence) -> int:
    """The slot of the token after the last token: the text begins after the model's start token."""
    return len(seq.tokens) - 1


def _target(seq: Sequence) -> EncoderDecoder:
    return cast(EncoderDecoder, cast(OfOneModel, seq.request.model).model)
