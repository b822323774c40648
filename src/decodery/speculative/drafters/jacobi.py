"""Jacobi: a chain of guesses that every pass corrects by what the model said."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from decodery.core import noise
from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.sequence import Sequence

_NEAR = 12.0
"""Guesses are drawn from the tokens whose logits lie at most this far, in nats, below the best."""


@dataclass(slots=True)
class _State:
    """guesses: tokens after the last token, refined by the last pass; laws: what each was drawn from, if wanted.

    followers: for every pair of tokens in the text, the token that followed it last; size: tokens read for it.
    """

    guesses: list[int] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)
    followers: dict[tuple[int, int], int] = field(default_factory=dict)
    size: int = 2


@register(
    "jacobi",
    paper="Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding (2024)",
    lossless=True,
    slower=True,
)
@dataclass(frozen=True)
class Jacobi(Drafter):
    """Drafts a chain of guesses; the tokens the sampler draws after them are the next pass's guesses.

    A guess is drawn with the noise of its own output position. Under the coupled rule the token that will be emitted
    there is drawn with the same noise, so a guess is accepted as soon as the pass before it saw the right distribution,
    and the text is that of plain decoding. Under the rejection rule the same chain, with the distributions it was drawn
    from, is the published method: accept with probability min(1, p/q), else draw from norm(max(p - q, 0)). That stays
    exact because the noise of a position is used by nothing before it. At temperature 0 both are Jacobi decoding.
    Scope: the request; memory: the window, under the rejection rule with one distribution per guess, and for "lookup"
    one dictionary entry per token. Source: tyshiwo1/Accelerating-T2I-AR-with-SJD (2024), whose windows have 16 rows.

    Attributes:
        window: Rows of a pass, the last token included.
        fill: How a new guess at the end is made: "random" from the vocabulary (published), "last" token again, or
            "lookup": what followed the last two tokens before.
    """

    window: int = 16
    fill: Literal["random", "last", "lookup"] = "random"

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if self.window < 2 or self.fill not in ("random", "last", "lookup"):
            raise SettingsError("jacobi needs window >= 2 and fill 'random', 'last' or 'lookup'")

    def largest(self) -> int:
        return self.window - 1

    def start(self, seq: Sequence) -> _State:
        return _State()

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        state: _State = seq.states[self]
        self._fill(state, seq)
        guesses = state.guesses[: min(budget.nodes, budget.depth)]
        # Nothing can be guessed after an end of text.
        end = next((at for at, guess in enumerate(guesses) if guess in seq.request.eos_ids), len(guesses))
        guesses = guesses[: end + 1]
        laws = dict(enumerate(state.laws[: len(guesses)]))
        return DraftTree.chain(seq.last_token, guesses, origin="sampled", distributions=laws)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        state: _State = seq.states[self]
        nodes = _follow(seen.tree, state.guesses)
        # Guess d stood at depth d + 1, and the row of depth d chose what comes there. The emitted tokens settle the
        # rows down to the last accepted one; the rows after it speak of what is still to come.
        unsettled = nodes[len(seen.emitted) - 1 :]
        state.guesses, state.laws = [], []
        if not unsettled or seq.finished:
            return
        contexts = [seq.request.sampler.ahead(seq.context(), ())]
        for node, following in pairwise(unsettled):
            token = int(seen.tree.tokens[following])
            contexts.append(seq.request.sampler.extend(contexts[-1], token, seen.logits[node]))
        # A slice copies nothing; only in a tree shared with other drafts do the rows lie apart.
        first, last = unsettled[0], unsettled[-1]
        rows = seen.logits[first : last + 1] if last - first + 1 == len(unsettled) else seen.logits[unsettled]
        law = seq.request.sampler.law(rows, contexts)
        if not seq.request.sampler.greedy:
            law = _likely(law)
        state.guesses = seq.request.sampler.pick(
            law, seq.request.seed, [context.position for context in contexts]
        ).tolist()
        if seq.request.acceptance_rule.requirements.laws:
            state.laws = list(seq.request.sampler.preferences(law))

    def _fill(self, state: _State, seq: Sequence) -> None:
        """New guesses up to the window, a function of what stands before them: point distributions."""
        if self.fill == "lookup":
            for at in range(state.size, len(seq.tokens)):
                state.followers[seq.tokens[at - 2], seq.tokens[at - 1]] = seq.tokens[at]
            state.size = max(state.size, len(seq.tokens))
        while len(state.guesses) < self.window - 1:
            token = self._new(state, seq)
            state.guesses.append(token)
            if seq.request.acceptance_rule.requirements.laws:
                law = torch.zeros(seq.request.vocab_size, dtype=torch.float64, device=seq.request.model.device)
                law[token] = 1.0
                state.laws.append(law)

    def _new(self, state: _State, seq: Sequence) -> int:
        last = [*seq.tokens[-2:], *state.guesses[-2:]][-2:]
        if self.fill == "last":
            return last[-1]
        if self.fill == "lookup" and (found := state.followers.get((last[0], last[-1]))) is not None:
            return found
        position = seq.position + len(state.guesses)
        return int(noise.draw(seq.request.seed, position, stream=noise.GUESS) * seq.request.vocab_size)


def _likely(law: torch.Tensor) -> torch.Tensor:
    """`law` without what is drawn next to never: far fewer tokens then need noise, and few of them were right."""
    if law.device.type != "cpu":
        return law.masked_fill(law < law.amax(dim=-1, keepdim=True) - _NEAR, -math.inf)
    # Row by row in numpy, which wakes no threads between two passes.
    rows = law.numpy().copy()
    for row in rows:
        row[row < row.max() - _NEAR] = -np.inf
    return torch.from_numpy(rows)


def _follow(tree: DraftTree, guesses: list[int]) -> list[int]:
    """Nodes of the guesses in a tree, as far down as they are in it; they may share it with other drafts."""
    nodes, node = [], 0
    for guess in guesses:
        child = tree.child(node, guess)
        if child is None:
            break
        nodes.append(child)
        node = child
    return nodes
