"""Drafting while the target verifies: two models that never wait for each other longer than for one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import cast

import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import Ledger
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.loaders.named import Precision
from decodery.models.protocol import LanguageModel, Reader
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.step.look_ahead import UNSAID
from decodery.step.pass_prices import prices_of
from decodery.step.sequence import Sequence

from .draft_model import DraftModel
from .follower import Follower

_MOST = 16
"""Tokens of a round at most, however much faster the draft model is."""


@dataclass(slots=True)
class Ahead:
    """What a draft model has written ahead.

    Attributes:
        reading: What the draft model has read.
        length: How many tokens to write at most.
        tokens: The text and the draft it stands after, and what was written.
        laws: By place in the text, what a token there was drawn from.
    """

    reading: Follower
    length: int
    tokens: list[int] = field(default_factory=list)
    laws: dict[int, torch.Tensor] = field(default_factory=dict)


@register(
    "pearl",
    paper="PEARL: Parallel Speculative Decoding with Adaptive Draft Length (2024)",
    guarantee="the output distribution is unchanged",
    lossless=True,
    requirements=("a second model with the same vocabulary, or the one that comes with the target",),
)
@dataclass(frozen=True)
class Pearl(Drafter):
    """Lets the draft model write on while the target checks what it wrote before.

    While a draft is checked, the draft model goes on after its end, as if all of it were accepted; where it is, the
    next draft is there already. After a rejection the target goes on alone by one token, while the draft model writes
    from there: what it guesses first is checked by that very pass. So a draft is as long as the target agrees with it,
    round after round, and a round takes as long as the slower of the two.

    The first token after a draft is checked by the token that the target draws there, in place of a test of its own:
    under the coupled rule both draw with the same noise, so that they differ only where the models do. Where there is
    one thread alone, nothing overlaps and the text is the same. Scope: the request; memory: one more cache. Source:
    smart-lty/ParallelSpeculativeDecoding (2024), whose lengths are 3 to 5, near the ratio of the two speeds.

    Attributes:
        model, dtype, transform: As in draft-model.
        length: Tokens of a round; 0 for as many as the draft model writes during one pass of the target, by what passes
            of both were measured to take.
    """

    model: LanguageModel | str | None = None
    dtype: Precision = "auto"
    transform: str | None = None
    length: int = 4

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if self.length < 0:
            raise SettingsError(f"pearl needs length >= 1, or 0 for what was measured, not {self.length}")
        self._drafts()

    @property
    def requirements(self) -> Requirements:
        return Requirements(costs=self.length == 0)

    def start(self, seq: Sequence) -> Ahead:
        reading = self._drafts().start(seq)
        assert isinstance(reading, Follower)
        if reading.model is seq.request.model and seq.request.model.device.type == "cuda":
            raise SettingsError("pearl runs two models at a time: name another one than the target on a GPU")
        return Ahead(reading, self.length or _ratio(seq.request.model, reading.model))

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return self._drafts().auxiliary_models(target)

    def largest(self) -> int:
        return self.length or _MOST

    def held_rows(self, nodes: int) -> int:
        return 3

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        ahead: Ahead = seq.states[self]
        known, most = len(seq.tokens), min(budget.nodes, budget.depth)
        if most < 1 or ahead.tokens[:known] != seq.tokens:
            # What was written stands after something else: the target goes on alone by one token.
            return DraftTree.root(seq.last_token)
        drafted = ahead.tokens[known : known + most]
        laws = {place: ahead.laws[known + place] for place in range(len(drafted)) if known + place in ahead.laws}
        return DraftTree.chain(seq.last_token, drafted, origin="sampled", distributions=laws)

    def ahead(self, seq: Sequence, tree: DraftTree) -> ForwardCoroutine[None] | None:
        ahead: Ahead = seq.states[self]
        draft = tree.trunk().tokens[1:].tolist()
        room = ahead.reading.model.config.max_positions - len(seq.tokens) - len(draft)
        most = min(ahead.length, seq.remaining - len(draft), room)
        if most < 1 or not seq.request.eos_ids.isdisjoint(draft):
            return None
        return self._write(seq, ahead, draft, most)

    def more_for(self, seq: Sequence, tokens: int) -> int:
        ahead: Ahead = seq.states[self]
        # It writes on while its last draft is checked.
        return ahead.reading.more_for(tokens + ahead.length)

    def forget(self, seq: Sequence) -> None:
        ahead: Ahead = seq.states[self]
        ahead.reading.forget()

    def _drafts(self) -> DraftModel:
        return DraftModel(self.model, self.dtype, self.transform)

    def _write(self, seq: Sequence, ahead: Ahead, draft: list[int], most: int) -> ForwardCoroutine[None]:
        """Write up to `most` tokens after a text and its draft."""
        sampler, context = seq.request.sampler, seq.request.sampler.ahead(seq.context(), draft)
        base, drafted, ledger = [*seq.tokens, *draft], list[int](), seq.trace.ledger
        ahead.tokens, laws = base, ahead.laws
        while len(drafted) < most:
            tree = DraftTree.chain(base[-1], drafted)
            logits = yield from _charged(ahead.reading.after(base, tree, [len(drafted)]), ledger)
            row = sampler.law(logits.clamp(min=UNSAID), [context])
            token = int(sampler.pick(row, seq.request.seed, [context.position])[0])
            if logits[0, token] == -torch.inf:
                # A mask may leave nothing that a drafter with few tokens can say.
                break
            if seq.request.acceptance_rule.requirements.laws:
                laws[len(base) + len(drafted)] = sampler.preferences(row)[0]
            drafted.append(token)
            ahead.tokens = [*base, *drafted]
            if token in seq.request.eos_ids:
                break
            context = sampler.extend(context, token, logits[0])
        ahead.laws = {place: law for place, law in laws.items() if place >= len(seq.tokens)}


def _charged(coroutine: ForwardCoroutine[torch.Tensor], ledger: Ledger) -> ForwardCoroutine[torch.Tensor]:
    """What a reading says, and its passes entered in a ledger: passes that run beside another are counted only here."""
    resume: Callable[[], list[ForwardRequest]] = partial(next, coroutine)
    while True:
        try:
            requests = resume()
        except StopIteration as stop:
            return cast(torch.Tensor, stop.value)
        begin = perf_counter()
        try:
            scored = yield requests
        except Exception as error:
            resume = partial(coroutine.throw, error)
            continue
        for request in requests:
            ledger.spend(request.role, len(request.segment), perf_counter() - begin, first=True)
        resume = partial(coroutine.send, scored)


def _ratio(target: Reader, draft: Reader) -> int:
    """How many passes of the draft model fit into one of the target."""
    slow, fast = (float(prices_of(cast(LanguageModel, model))[0].seconds(1, 0)[0]) for model in (target, draft))
    return max(1, min(_MOST, round(slow / fast)))
