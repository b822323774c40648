"""Token Recycling: the candidates the model ranked highest, kept for the next time the same token stands there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.drafter_memory import Scope
from decodery.step.sequence import Sequence

from ..stores.adjacency import Adjacency
from ..tree_building.template import TOKEN_RECYCLING, RankRates


@dataclass(frozen=True, slots=True)
class _Memory:
    store: Adjacency
    rates: RankRates


@register(
    "token-recycling",
    paper="Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling (2024)",
    lossless=True,
    slower=True,
)
@dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Drafts from the successors the model itself ranked highest the last time it saw each token.

    Memory: 4 * vocabulary * width bytes.

    Attributes:
        width: Successors kept per token.
        nodes: So many of the published tree's 80 are fed; of a smaller number those on the rank paths that were right
            most often.
        seed_from_prompt: Learn from the prompt's rows as well (the published code does not).
        scope: How long successors are kept.
    """

    width: int = 8
    nodes: int = 80
    seed_from_prompt: bool = True
    scope: Scope = "process"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise SettingsError(f"token-recycling needs a width of at least 1, not {self.width}")
        TOKEN_RECYCLING.require("token-recycling", self.nodes)

    @property
    def requirements(self) -> Requirements:
        return Requirements(prompt=self.seed_from_prompt)

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> _Memory:
        def make() -> _Memory:
            store = Adjacency(seq.request.vocab_size, self.width)
            return _Memory(store, RankRates(store.width))

        memory: _Memory = seq.request.memory.recall(
            self.scope, seq, ("token-recycling", seq.request.vocab_size, self.width), make
        )
        return memory

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        memory: _Memory = seq.states[self]
        tree, _ = TOKEN_RECYCLING.fill(
            seq.last_token,
            lambda nodes, tokens: memory.store.successors(tokens[nodes]),
            memory.rates.rates,
            Budget(min(self.nodes, budget.nodes), budget.depth),
            eos_ids=seq.request.eos_ids,
        )
        return tree

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        memory: _Memory = seq.states[self]
        if seen.emitted:
            run = np.array(seq.tokens[-len(seen.emitted) - 1 :])
            memory.rates.learn(memory.store.ranks(run[:-1], run[1:]))
        memory.store.learn(seen)
