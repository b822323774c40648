"""The trees of the most likely tokens of texts in arrays: native calls whose arguments stay where they are."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from ctypes import addressof, c_void_p

import numpy as np

from decodery.core.native.kernels import ProposedStruct, address, library
from decodery.models.native.array_step import ArraySteps
from decodery.step.sequence import Sequence

from .native_tree import Held, NativeText, stores_of


class NativeBatch:
    """What `propose_together` and `learn_together` do, for texts that stay in arrays.

    Args:
        texts, sequences: [n] the texts.
        places: [n] their numbers in the batch.
        limits: [n] nodes of each tree at most.
    """

    def __init__(
        self,
        texts: Ordered[NativeText],
        sequences: Ordered[Sequence],
        places: Ordered[int],
        limits: Ordered[int],
    ) -> None:
        self._texts, count = texts, len(texts)
        for text, seq in zip(texts, sequences, strict=True):
            text.stand(seq, len(seq.tokens))
        self._pasts = [(past, [each for each in texts if each.memory.past is past]) for past in _pasts(texts)]
        self._held = Held(stores_of(texts))
        self._pointers = (c_void_p * count)(*(text.address for text in texts))
        self._places, self._failed = np.array(places, dtype=np.int32), np.zeros(count + 1, dtype=np.int32)
        self._most = np.array([min(each, text.limit) for each, text in zip(limits, texts, strict=True)], dtype=np.int32)
        # A tree is never deeper than what is left of its text but one; its last token stands at `next`.
        ends = [seq.request.prompt_length + seq.request.max_new_tokens - 2 for seq in sequences]
        self._ends = np.array(ends, dtype=np.int64)
        self.nodes = int(self._most.sum())
        """Of all trees together at most."""
        self._costs = np.ones(self.nodes + 1)
        self._step = step = ProposedStruct(count=count)
        step.texts, self._width = addressof(self._pointers), texts[0].memory.contexts.width
        step.limits, step.ends = self._most.ctypes.data, self._ends.ctypes.data
        step.places, step.costs = self._places.ctypes.data, address(self._costs, np.float64, None)
        self._at, self._pointers_at = addressof(step), addressof(self._pointers)
        self._places_at, self._failed_at = self._places.ctypes.data, self._failed.ctypes.data
        self._drafts: np.ndarray = np.empty(0)
        self._sizes = self._next = self._drafts
        self._ranked = 0
        self.accepted = 0
        """Drafted tokens that became text in the step that was learned last."""
        self._lib = library()
        assert self._lib is not None

    def propose(self, steps: ArraySteps, costs: np.ndarray, given: float, nodes: int) -> int:
        """Write the texts' trees into the batch.

        Args:
            steps: The batch.
            costs: [up to `nodes` + 1] times of the step with 0, 1, 2, ... drafted nodes of all texts together.
            given: Tokens that the step gives without a draft.
            nodes: Of each text at most.

        Returns:
            How many nodes are drafted; -1 where no row could pay, however likely its token.
        """
        step, lib = self._step, self._lib
        assert lib is not None
        if self._drafts is not steps.drafts or self._sizes is not steps.sizes:
            self._drafts, self._sizes = steps.drafts, steps.sizes
            step.tokens, step.parents = (steps.drafts[part].ctypes.data for part in range(2))
            step.sizes, step.stride = steps.sizes.ctypes.data, steps.drafts.shape[2]
            self._ranked = min(self._width, steps.logits.shape[1])
        if self._next is not steps.next:
            self._next, step.next = steps.next, steps.next.ctypes.data
        self._costs[: len(costs)], step.cost_count, step.given = costs, len(costs), given
        step.nodes = nodes
        for past, texts in self._pasts:
            handle = past.native()
            if texts[0].past != handle:
                for text in texts:
                    text.past = handle
        with self._held:
            return int(lib.decodery_propose(self._at))

    @property
    def promised(self) -> float:
        """The sum of the chances of all nodes that were drafted last."""
        return float(self._step.promised)

    def learn(self, steps: ArraySteps) -> list[int]:
        """Learn of the step; returns the numbers of texts whose logits hold NaN, of which nothing is learned."""
        lib = self._lib
        assert lib is not None
        count = len(self._texts)
        with self._held:
            failed = lib.decodery_learn_step(
                self._pointers_at, self._places_at, steps.address, count, self._ranked, self._failed_at
            )
        self.accepted = int(self._failed[-1])
        return self._places[self._failed[:-1] != 0].tolist() if failed else []

    def follow(self, steps: ArraySteps) -> None:
        """The texts go on by what the step gave them; nothing is learned of it."""
        assert self._lib is not None
        self._lib.decodery_follow(self._pointers_at, self._places_at, steps.address, len(self._texts))


def _pasts(texts: Ordered[NativeText]) -> list:
    return list({id(text.memory.past): text.memory.past for text in texts}.values())
