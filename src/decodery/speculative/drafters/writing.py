"""A chain as it is drawn, token by token, from what a drafter expects."""

from __future__ import annotations

from dataclasses import replace

import torch

from decodery.step.draft_tree import DraftTree
from decodery.step.look_ahead import UNSAID
from decodery.step.sequence import Sequence


class Writing:
    """What a drafter writes after a text in one step.

    Every token is the one that the request's own noise draws where the drafter's expectations are the distribution.

    Args:
        seq: A view of the text with it.
        drafted: It alone.
        ended: Whether nothing can follow: the text would end there, or the drafter has no word that it may say.
    """

    def __init__(self, seq: Sequence) -> None:
        self.seq = replace(seq, tokens=list(seq.tokens))
        self.drafted: list[int] = []
        self.ended = False
        self._pending, self._context = seq.last_token, seq.request.sampler.ahead(seq.context(), ())
        self._laws: dict[int, torch.Tensor] = {}

    @property
    def chain(self) -> DraftTree:
        """The draft."""
        return DraftTree.chain(self._pending, self.drafted, origin="sampled", distributions=self._laws)

    def draw(self, logits: torch.Tensor) -> int | None:
        """Write one token more, by the drafter's own logits [vocab]; None where it has nothing to say."""
        seq, sampler = self.seq, self.seq.request.sampler
        law = sampler.law(logits[None].clamp(min=UNSAID), [self._context])
        token = int(sampler.pick(law, seq.request.seed, [self._context.position])[0])
        if logits[token] == -torch.inf:
            # A mask may leave nothing that a drafter with few tokens can say.
            self.ended = True
            return None
        if seq.request.acceptance_rule.requirements.laws:
            self._laws[len(self.drafted)] = sampler.preferences(law)[0]
        self._context = sampler.extend(self._context, token, logits)
        self.drafted.append(token)
        seq.tokens.append(token)
        seq.processor_states = self._context.state
        self.ended = token in seq.request.eos_ids
        return token
