"""Copies of earlier text as drafts of texts in arrays: native calls for all of them together."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from ctypes import addressof, c_void_p
from typing import Generic, TypeVar

import numpy as np

from decodery.core.native.kernels import library
from decodery.models.step_arrays import StepArrays
from decodery.step.draft_batch import DraftBatch, JointBudget
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence

from ..stores.native_ngrams import NativeNgrams
from ..stores.ngrams import Pick
from .forced import unforced

_Index = TypeVar("_Index")


class CopiedText(Generic[_Index]):
    """Where a text's n-grams stood before.

    Args:
        index: For a text that is drafted for by itself.
        orders: Lengths of the n-grams.
        pick: The occurrence to remember.
    """

    def __init__(self, index: _Index, orders: Ordered[int], pick: Pick) -> None:
        self.index, self._orders, self._pick = index, tuple(orders), pick
        self._native: NativeNgrams | None = None

    @property
    def native(self) -> NativeNgrams:
        """The same for native calls."""
        if self._native is None:
            self._native = NativeNgrams(self._orders, self._pick)
        return self._native


class CopyBatch(DraftBatch):
    """Of each text what followed its longest n-gram where that stood before.

    Args:
        places: The numbers of the texts in the batch.
        sequences: [n] the texts.
        stores: [n] where their n-grams are kept.
        length: Tokens copied at most.
        wraps: Whether a copy that reaches the end of the text goes on into itself, and ends before a token that ends
            the text.
    """

    def __init__(
        self,
        places: Ordered[int],
        sequences: Ordered[Sequence],
        stores: Ordered[NativeNgrams],
        *,
        length: int,
        wraps: bool,
    ) -> None:
        super().__init__(places)
        lib = library()
        assert lib is not None
        self._lib, self._stores, self._wraps, count = lib, stores, wraps, len(stores)
        for store, seq in zip(stores, sequences, strict=True):
            if store.size != len(seq.tokens):
                store.hold(seq.tokens)
        self._texts = (c_void_p * count)(*(store.handle for store in stores))
        self._numbers = np.array(places, dtype=np.int32)
        ends = [sorted(seq.request.eos_ids) if wraps else [] for seq in sequences]
        self._ends = [np.array(each, dtype=np.int64) for each in ends]
        self._end_counts = np.array([len(each) for each in ends], dtype=np.int32)
        self._ends_at = (c_void_p * count)(*(each.ctypes.data for each in self._ends))
        self._most = np.array([min(length, seq.request.max_draft_tokens) for seq in sequences], dtype=np.int64)
        # A draft is never deeper than what is left of its text but one; its last token stands at `next`.
        lasts = [seq.request.prompt_length + seq.request.max_new_tokens - 2 for seq in sequences]
        self._lasts = np.array(lasts, dtype=np.int64)
        self._limits = np.zeros(count, dtype=np.int32)
        arrays = self._texts, self._ends_at
        self._texts_at, self._ends_list = (addressof(each) for each in arrays)
        self._arrays = tuple(each.ctypes.data for each in (self._numbers, self._limits, self._end_counts))

    @staticmethod
    def of(
        drafter: Drafter, places: Ordered[int], sequences: Ordered[Sequence], *, length: int, wraps: bool
    ) -> CopyBatch | None:
        """The drafts of texts whose states are `CopiedText`; None without native kernels.

        Args:
            drafter: Equal to theirs.
            places, sequences, length, wraps: See the class.
        """
        if library() is None:
            return None
        stores = [seq.states[unforced(seq.request.drafter or drafter)].native for seq in sequences]
        return CopyBatch(places, sequences, stores, length=length, wraps=wraps)

    def propose(self, steps: StepArrays, budget: JointBudget) -> int:
        self._limits[:] = np.minimum(self._most, self._lasts - steps.next[self._numbers]).clip(0, budget.nodes)
        numbers, limits, counts = self._arrays
        return int(
            self._lib.decodery_copies(
                self._texts_at, numbers, limits, self._ends_list, counts, len(self._stores), self._wraps, steps.address
            )
        )

    def learn(self, steps: StepArrays, ended: Ordered[int]) -> dict[int, Exception]:
        self._lib.decodery_copies_follow(self._texts_at, self._arrays[0], len(self._stores), steps.address)
        return {}

    def leave(self) -> None:
        """What the stores hold stays with the texts."""
