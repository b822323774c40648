"""The trees of the most likely tokens of texts in arrays: native calls whose arguments stay where they are."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from ctypes import addressof, c_void_p

import numpy as np

from decodery.core.native.kernels import address, library
from decodery.core.native.structs import DraftingStruct, ProposedStruct
from decodery.models.step_arrays import StepArrays
from decodery.step.draft_batch import JointBudget
from decodery.step.pass_prices import MARGIN, REMEMBERED, ROWS, NativePrices, PassPrices, Promises
from decodery.step.sequence import Sequence

from .native_tree import Held, NativeText, stores_of


class NativeBatch:
    """What `propose_together` and `learn_together` do, for texts that stay in arrays.

    Args:
        texts, sequences: [n] the texts.
        places: [n] their numbers in the batch.
        limits: [n] nodes of each tree at most.
        promises: What became of earlier drafts for the model.
        leads: [n] drafted tokens of each text that became text, beyond those of the slowest one.
        state: What is known of these texts, by the names in `DraftingStruct`.
    """

    def __init__(
        self,
        texts: Ordered[NativeText],
        sequences: Ordered[Sequence],
        places: Ordered[int],
        limits: Ordered[int],
        promises: Promises,
        leads: Ordered[float],
        **state: float,
    ) -> None:
        self._texts, self._sequences, count = texts, sequences, len(texts)
        self.catch_up()
        self._pasts = [(past, [each for each in texts if each.memory.past is past]) for past in _pasts(texts)]
        self._held = Held(stores_of(texts))
        self._pointers = (c_void_p * count)(*(text.address for text in texts))
        self._places, self._failed = np.array(places, dtype=np.int32), np.zeros(count + 1, dtype=np.int32)
        self._most = np.array([min(each, text.limit) for each, text in zip(limits, texts, strict=True)], dtype=np.int32)
        # A tree is never deeper than what is left of its text but one; its last token stands at `next`.
        ends = [seq.request.prompt_length + seq.request.max_new_tokens - 2 for seq in sequences]
        self._ends = np.array(ends, dtype=np.int64)
        self._nodes = min(int(self._most.sum()), ROWS - 1)
        self._costs, self._promises = np.ones(self._nodes + 1), promises
        self._drafting = drafting = DraftingStruct(
            step=ProposedStruct(count=count), remembered=REMEMBERED, margin=MARGIN, sequences=-1, **state
        )
        self._step = drafting.step
        self._priced_by: PassPrices | None = None
        step, self._context, self._width = drafting.step, 0.0, texts[0].memory.contexts.width
        step.texts = addressof(self._pointers)
        step.limits, step.ends = self._most.ctypes.data, self._ends.ctypes.data
        step.places = self._places.ctypes.data
        step.costs = drafting.costs = address(self._costs, np.float64, None)
        self._leads = np.array([leads, np.ones(count)])
        drafting.leads, drafting.weights = (each.ctypes.data for each in self._leads)
        self._at, self._failed_at = addressof(drafting), self._failed.ctypes.data
        self._drafts: np.ndarray = np.empty(0)
        self._sizes = self._next = self._drafts
        self._ranked = 0
        self._lib = library()
        assert self._lib is not None

    @property
    def state(self) -> DraftingStruct:
        """What is known of these texts."""
        return self._drafting

    def catch_up(self) -> None:
        """Go on with what has become text where nothing was learned of it."""
        for text, seq in zip(self._texts, self._sequences, strict=True):
            text.stand(seq, len(seq.tokens))

    @property
    def leads(self) -> list[float]:
        """Drafted tokens of each text that became text, beyond those of the slowest one."""
        return self._leads[0].tolist()

    @property
    def priced(self) -> bool:
        """Whether it is known by now what steps take, and drafts are to be paid for."""
        return bool(self._drafting.prices) and self._step.cost_count > 0

    def charge(self, seconds: float, latest: float) -> None:
        """This is what was done for drafts beside the passes, and of it in the last step."""
        drafting = self._drafting
        drafting.balance -= seconds / self._costs[0]
        if not drafting.skipped:
            drafting.look = self._promises.looked(drafting.sequences, latest)

    def propose(self, steps: StepArrays, budget: JointBudget) -> int:
        """Write the texts' trees into the batch.

        Args:
            steps: The batch.
            budget: Of this step.

        Returns:
            How many nodes are drafted.
        """
        drafting, step, lib = self._drafting, self._step, self._lib
        assert lib is not None
        self._context, count = budget.context, len(budget.texts)
        if drafting.sequences != count or self._priced_by is not budget.prices:
            self._share_with(count, budget.prices)
        if budget.prices is None:
            costs = budget.drafted(min(drafting.nodes, len(self._texts) * budget.nodes))
            self._costs[: len(costs)], step.cost_count, step.given = costs, len(costs), float(count)
        if self._drafts is not steps.drafts or self._sizes is not steps.sizes:
            self._drafts, self._sizes = steps.drafts, steps.sizes
            step.tokens, step.parents = (steps.drafts[part].ctypes.data for part in range(2))
            step.sizes, step.stride = steps.sizes.ctypes.data, steps.drafts.shape[2]
            self._ranked = min(self._width, steps.logits.shape[1])
        if self._next is not steps.next:
            self._next, step.next = steps.next, steps.next.ctypes.data
        for past, texts in self._pasts:
            handle = past.native()
            if texts[0].past != handle:
                for text in texts:
                    text.past = handle
        with self._held:
            return int(lib.decodery_draft_all(self._at, budget.context, budget.nodes))

    def _share_with(self, count: int, prices: PassPrices | None) -> None:
        """From now on so many texts share the pass, at these prices; None: they are given."""
        drafting, self._priced_by = self._drafting, prices
        drafting.sequences, drafting.nodes = count, min(self._nodes, max(ROWS - 1 - count, 0))
        drafting.prices = prices.address if isinstance(prices, NativePrices) else None
        drafting.kept, drafting.promised = self._promises.addresses(count)
        drafting.look = self._promises.look(count)

    def learn(self, steps: StepArrays) -> list[int]:
        """Learn of the step; returns the numbers of texts whose logits hold NaN, of which nothing is learned."""
        lib = self._lib
        assert lib is not None
        with self._held:
            failed = lib.decodery_drafts_learn(self._at, steps.address, self._context, self._ranked, self._failed_at)
        return self._places[self._failed[:-1] != 0].tolist() if failed else []


def _pasts(texts: Ordered[NativeText]) -> list:
    return list({id(text.memory.past): text.memory.past for text in texts}.values())
