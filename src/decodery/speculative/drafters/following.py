"""What drafters have in common that read along with a text, by a model and a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.requirements import Origin
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.look_ahead import Ahead, Level, Look
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.wanted import RowChoices, Wanted, up_to_end

from .follower import Follower


@dataclass(frozen=True)
class Following(TreeDrafter):
    """An `TreeDrafter` that keeps a `Follower` of each text, which its `start` begins."""

    def reach(self, seq: Sequence) -> int:
        reading: Follower = seq.states[self]
        # Its own context may be the shorter one; after its end it has nothing to say.
        return reading.model.config.max_positions - len(seq.tokens) + 1

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        reading: Follower = seq.states[self]
        if reading.model.device.type == "cpu":
            return reading.after(seq.tokens, tree, nodes)
        # Chains are drawn, and trees take what is most likely.
        draws = self.tree_policy is None and not seq.request.sampler.plain
        wanted = Wanted.after(seq, tree, nodes, ranks=reading.ranks, draws=draws)
        return reading.after(seq.tokens, tree, nodes, wanted)

    def drawn(self, seq: Sequence, length: int) -> ForwardCoroutine[list[int]]:
        reading = seq.states[self]
        if length < 2 or not isinstance(reading, Follower) or not reading.model.capabilities.chosen:
            return []
        rows = Wanted.chain(seq, length)
        return up_to_end(seq, (yield from reading.drawn(seq.tokens, rows))) if rows else []

    def read_ahead(
        self,
        seq: Sequence,
        plan: tuple[Level, ...],
        *,
        shaped: bool = True,
        origin: Origin = "deterministic",
    ) -> ForwardCoroutine[Ahead | None] | None:
        reading = seq.states[self]
        if not isinstance(reading, Follower) or not reading.sees(len(plan)):
            return None
        if (look := Look.below(seq, plan, origin, shaped=shaped)) is None:
            return None
        look.padding = seq.request.padding
        return reading.ahead(seq.tokens, look)

    def row_choices(self, seq: Sequence) -> RowChoices | None:
        reading = seq.states[self]
        return reading.row_choices if isinstance(reading, Follower) else None

    def most_likely(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], k: int, *, shaped: bool = True
    ) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray]]:
        if isinstance(reading := seq.states[self], Follower):
            reading.ranks = max(reading.ranks, k)
        return (yield from super().most_likely(seq, tree, nodes, k, shaped=shaped))

    def more_for(self, seq: Sequence, tokens: int) -> int:
        reading = seq.states[self]
        return reading.more_for(tokens) if isinstance(reading, Follower) else 0

    def forget(self, seq: Sequence) -> None:
        reading: Follower = seq.states[self]
        reading.forget()
