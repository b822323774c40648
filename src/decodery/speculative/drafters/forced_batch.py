"""Forced tokens of texts in arrays, and what their constraints permit of another drafter's trees."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from decodery.core.errors import ConstraintError
from decodery.models.step_arrays import StepArrays
from decodery.models.torch_state import in_plain_state
from decodery.sampling.constraint import Constraint, constrained
from decodery.step.draft_batch import DraftBatch, JointBudget
from decodery.step.draft_tree import MASK_TOKEN, DraftTree
from decodery.step.sequence import Sequence


class ForcedBatch(DraftBatch):
    """The drafts of another batch without what constraints forbid.

    Where a constraint forces tokens that these do not begin with, the text drafts the forced tokens alone.

    Args:
        drafts: The other batch, of the same texts.
        sequences: [n] the texts.
        places: [n] their numbers in the batch.
    """

    def __init__(self, drafts: DraftBatch, sequences: Ordered[Sequence], places: Ordered[int]) -> None:
        super().__init__(places)
        self._drafts = drafts
        self._texts = [
            (place, seq, *found)
            for place, seq in zip(places, sequences, strict=True)
            if (found := constrained(seq.request.sampler.processors)) is not None
        ]
        # How many tokens of a chain that takes the place of a tree are those of the tree, too.
        self._guessed: dict[int, int] = {}
        # Texts of the step when the other batch was last asked.
        self._shared = 0

    @in_plain_state
    def propose(self, steps: StepArrays, budget: JointBudget) -> int:
        self._guessed, drafted = {}, 0
        if self._drafts.rests and len(budget.texts) == self._shared:
            # Forced tokens are drafted in any case.
            self._drafts.rests -= 1
        else:
            drafted, self._shared = self._drafts.propose(steps, budget), len(budget.texts)
        self.failed, self._drafts.failed = self._drafts.failed, {}
        for place, seq, number, constraint in self._texts:
            most = min(budget.nodes, seq.request.max_draft_tokens, seq.remaining - 1)
            try:
                drafted += self._restrict(steps, place, seq, constraint, seq.processor_states[number], most)
            except Exception as error:
                self.failed[place] = error
        return drafted

    def _restrict(
        self, steps: StepArrays, place: int, seq: Sequence, constraint: Constraint, state: object, most: int
    ) -> int:
        """Leave a text what its constraint permits; returns how many nodes that is more than before."""
        forced, size = constraint.forced(state, most), int(steps.sizes[place])
        if size == 1 and not forced:
            return 0
        tokens, parents = steps.drafts[:, place, :size].copy()
        tokens[0], parents[0] = seq.last_token, -1
        tree = DraftTree(tokens, parents)
        guessed, node = 0, 0
        for token in forced:
            child = tree.child(node, token)
            if child is None:
                tree, self._guessed[place] = DraftTree.chain(seq.last_token, forced), guessed
                break
            node, guessed = child, guessed + 1
        else:
            tree = permitted(tree, constraint, state)
        steps.draft(place, tree.tokens, tree.parents)
        return len(tree) - size

    def learn(self, steps: StepArrays, ended: Ordered[int]) -> dict[int, Exception]:
        places = [*self._guessed]
        accepted = steps.accepted[places]
        # What was forced is no guess that came true.
        steps.accepted[places] = np.minimum(accepted, [*self._guessed.values()])
        try:
            return self._drafts.learn(steps, ended)
        finally:
            steps.accepted[places] = accepted

    @property
    def asks(self) -> bool:
        return self._drafts.asks

    def leave(self) -> None:
        self._drafts.leave()


def permitted(tree: DraftTree, constraint: Constraint, state: object) -> DraftTree:
    """The nodes that the constraint permits after `state`, in which the root's successors stand."""
    if len(tree) == 1:
        return tree
    states: dict[int, object] = {0: state}
    keep = np.zeros(len(tree), dtype=bool)
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if token == MASK_TOKEN:
            # Nothing is written there, so that nothing is forbidden.
            keep[node] = parent == 0 or keep[parent]
        elif parent in states:
            try:
                if constraint.permits(states[parent], token):
                    states[node] = constraint.advance(states[parent], token)
                    keep[node] = True
            except ConstraintError:
                # The text may never come to what is guessed.
                continue
    return tree if keep[1:].all() else tree.prune(keep)
