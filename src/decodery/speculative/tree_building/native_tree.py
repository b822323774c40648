"""The tree of the most likely tokens, and what is learned of a step, in one native call each."""

from __future__ import annotations

from ctypes import addressof, c_int64

import numpy as np
import torch

from decodery.core.errors import NumericalError
from decodery.core.native.kernels import ExpectedStruct, HappenedStruct, address, library
from decodery.core.topk import NAN
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.sequence import Sequence

from ..stores.expectations import CONTEXTS, HEED, MEAN, Expectations
from .likeliest import heeds

_MASK = (1 << 64) - 1


class NativeTree:
    """What `LikeliestTree` without an adviser and `Expectations.learn` do for one text, number for number.

    A copy of it, as of a forked text's state, is None: its owner makes another.

    Args:
        limit: Nodes of a tree at most.
    """

    def __init__(self, seq: Sequence, memory: Expectations, limit: int) -> None:
        self._memory, self.limit = memory, limit
        self._ends = np.array(sorted(seq.request.eos_ids), dtype=np.int64)
        self._nodes = np.empty((2, limit + 1), dtype=np.int64)
        self._copied = (c_int64 * (limit + 1))()
        self._ranked, self._values = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        known = self._known = ExpectedStruct(width=memory.contexts.width, ends_count=len(self._ends))
        for order, (keys, rows) in enumerate(zip(*memory.contexts.addresses(), strict=True)):
            known.keys[order], known.rows[order] = keys, rows
        known.rates, known.rated = memory.rates.of.ctypes.data, memory.rates.seen.ctypes.data
        known.ends, known.copied = self._ends.ctypes.data, addressof(self._copied)
        known.tokens, known.parents = self._nodes[0].ctypes.data, self._nodes[1].ctypes.data
        if heeds(seq):
            known.noise, known.noise_mean = HEED, MEAN
        self._trusts = {id(each): (each.hits.ctypes.data, each.seen.ctypes.data) for each in memory.trusts}
        self._step = HappenedStruct()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    @staticmethod
    def fits(memory: Expectations) -> bool:
        """Whether there are kernels for stores of this kind."""
        return library() is not None and memory.contexts.orders == CONTEXTS

    def grown(self, seq: Sequence, costs: np.ndarray, texts: int, depth: int) -> DraftTree:
        """The tree, after the copy that was found last.

        Args:
            costs: [up to limit + 1], and texts: as `Worth` has them.
        """
        lib, known, memory = library(), self._known, self._memory
        assert lib is not None
        self._stand(seq.tokens, len(seq.tokens))
        copied = memory.copied[: self.limit]
        for at, token in enumerate(copied):
            self._copied[at] = token
        known.copied_count, known.repeated = len(copied), memory.repeated
        known.hits, known.tried = self._trusts[id(memory.trust_now)]
        known.seed, known.position = seq.request.seed & _MASK, seq.position
        with memory.contexts.lock:
            size = lib.decodery_expect(addressof(known), address(costs, np.float64, None), len(costs), texts, depth)
            tokens, parents = self._nodes[:, :size].copy()
        return DraftTree(tokens, parents)

    def learn(self, seq: Sequence, seen: VerificationFeedback, judged: bool) -> bool:
        """Learn of a step; False where its logits are not for kernels.

        Args:
            judged: Whether guesses turned out by it.

        Raises:
            NumericalError: If logits hold NaN.
        """
        logits, tree = seen.logits, seen.tree
        if logits.device.type != "cpu" or logits.dtype != torch.float32 or not logits.is_contiguous():
            return False
        lib, step, contexts = library(), self._step, self._memory.contexts
        assert lib is not None
        rows, k = len(tree), min(contexts.width, logits.shape[1])
        if len(self._ranked) < rows * k:
            self._ranked, self._values = np.empty(rows * k, dtype=np.int32), np.empty(rows * k, dtype=np.float32)
        emitted, path = np.array(seen.emitted, dtype=np.int64), np.array(seen.path, dtype=np.int64)
        self._stand(seq.tokens, seen.start + 1)
        step.emitted, step.count = emitted.ctypes.data, len(emitted) if judged else 0
        step.tokens, step.parents = (address(each, np.int64, rows) for each in (tree.tokens, tree.parents))
        step.rows = rows
        step.accepted, step.length = path.ctypes.data, len(path)
        step.logits, step.vocab, step.k = address(logits, torch.float32, rows, None), logits.shape[1], k
        step.ranked, step.values = self._ranked.ctypes.data, self._values.ctypes.data
        with contexts.lock:
            if lib.decodery_learn(addressof(self._known), addressof(step)):
                raise NumericalError(NAN)
        return True

    def _stand(self, tokens: list[int], end: int) -> None:
        """The text up to `end`: its last tokens, the latest first."""
        known = self._known
        known.known = min(len(CONTEXTS), end)
        for back in range(known.known):
            known.last[back] = tokens[end - 1 - back]
