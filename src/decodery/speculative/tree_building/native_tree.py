"""The trees of the most likely tokens of all texts of a pass, and what is learned of it, in one native call each."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from ctypes import addressof, c_int64, c_void_p

import numpy as np
import torch

from decodery.core.native.kernels import address, library
from decodery.core.native.structs import ExpectedStruct, HappenedStruct, ProposedStruct
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Guarded
from decodery.step.sequence import Sequence

from ..stores.expectations import CONTEXTS, HEED, MEAN, Expectations
from ..stores.native_ngrams import NativeNgrams
from .most_likely import heeds

_MASK = (1 << 64) - 1


class NativeText:
    """What the native calls know of one text.

    They do what `MostLikelyTree` without an adviser and `Expectations` do, number for number.

    A copy of it, as of a forked text's state, is None: its owner makes another.

    Args:
        seq: The text.
        memory: Its stores. What followed its end before is found in n-grams of its own.
        limit: Nodes of a tree at most.
    """

    def __init__(self, seq: Sequence, memory: Expectations, limit: int) -> None:
        self.memory, self.limit = memory, limit
        self._ends = np.array(sorted(seq.request.eos_ids), dtype=np.int64)
        self._copied = (c_int64 * (limit + 1))()
        self._ngrams = NativeNgrams(memory.copies.orders)
        known = self._known = ExpectedStruct(width=memory.contexts.width, ends_count=len(self._ends))
        for order, (keys, rows) in enumerate(zip(*memory.contexts.addresses(), strict=True)):
            known.keys[order], known.rows[order] = keys, rows
        known.rates, known.rated = memory.rates.of.ctypes.data, memory.rates.seen.ctypes.data
        for number, trust in enumerate(memory.trusts):
            known.hits[number], known.tried[number] = trust.hits.ctypes.data, trust.seen.ctypes.data
        known.ends, known.copied = self._ends.ctypes.data, addressof(self._copied)
        known.text = self._ngrams.handle
        if heeds(seq):
            known.noise, known.noise_mean = HEED, MEAN

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    @staticmethod
    def fits(seq: Sequence, memory: Expectations) -> bool:
        """Whether there are kernels for stores of this kind and for the logits of the text's model."""
        return library() is not None and memory.contexts.orders == CONTEXTS and seq.request.model.device.type == "cpu"

    @property
    def address(self) -> int:
        """Where the `Expected` of csrc/abi.h stands, for native calls, as long as this object lives."""
        return addressof(self._known)

    @property
    def past(self) -> int | None:
        """The n-grams of earlier texts, of `decodery_ngrams`; None where there are none."""
        found: int | None = self._known.past
        return found

    @past.setter
    def past(self, handle: int | None) -> None:
        self._known.past = handle

    def stand(self, seq: Sequence, end: int) -> None:
        """Begin with the text up to `end`, where the native calls have not moved it there themselves."""
        known, tokens = self._known, seq.tokens
        known.past = self.memory.past.native()
        known.seed = seq.request.seed & _MASK
        known.position = end - seq.request.prompt_length
        if self._ngrams.size == end and known.known and known.last[0] == tokens[end - 1]:
            return
        self._ngrams.hold(tokens[:end])
        known.known = min(len(CONTEXTS), end)
        for back in range(known.known):
            known.last[back] = tokens[end - 1 - back]

    def pass_over(self) -> None:
        """Nothing was looked for in this step, so that nothing turns out by it."""
        self._known.asked = 0


def propose_together(
    texts: Ordered[NativeText],
    sequences: Ordered[Sequence],
    costs: np.ndarray,
    given: float,
    limits: Ordered[int],
    depths: Ordered[int],
    own: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    ends: Ordered[int] | None = None,
) -> tuple[list[DraftTree], float] | None:
    """The trees of texts that share a pass: the most likely tokens, as long as the next row pays.

    Args:
        texts, sequences: [n] the texts.
        costs: [up to the sum of limits + 1] times of the step with 0, 1, 2, ... drafted nodes of all texts together.
        given: Tokens that the step gives without a draft.
        limits: [n] nodes of each tree at most.
        depths: [n] depth of each tree at most.
        own: [n] float64 seconds that each node of a text takes beyond `costs`, by its context; None for nothing.
        weights: [n] float64 above 0, what a token of each text is worth; None for 1.
        ends: [n] how much of each text its tree follows; None: all.

    Returns:
        A tree each, and the sum of all nodes' chances; None where no row could pay, however likely its token.
    """
    lib = library()
    assert lib is not None
    ends = [len(seq.tokens) for seq in sequences] if ends is None else ends
    for text, seq, end in zip(texts, sequences, ends, strict=True):
        text.stand(seq, end)
    count, stride = len(texts), max(limits) + 1
    nodes, sizes = np.empty((2, count, stride), dtype=np.int64), np.empty(count, dtype=np.int32)
    bounds = np.array([[min(limit, text.limit) for limit, text in zip(limits, texts, strict=True)], depths], np.int32)
    places = (c_void_p * count)(*(text.address for text in texts))
    step = ProposedStruct(
        addressof(places), bounds[0].ctypes.data, bounds[1].ctypes.data, None, address(costs, np.float64, None),
        None if own is None else address(own, np.float64, count),
        None if weights is None else address(weights, np.float64, count), nodes[0].ctypes.data, nodes[1].ctypes.data,
        sizes.ctypes.data, None, None, given, 0.0, count, len(costs), stride, 0,
    )  # fmt: skip
    with Held(stores_of(texts)):
        drafted = lib.decodery_propose(addressof(step))
    if drafted < 0:
        return None
    trees = [DraftTree(*nodes[:, number, :size].copy()) for number, size in enumerate(sizes.tolist())]
    return trees, float(step.promised)


def learn_together(
    texts: Ordered[NativeText], sequences: Ordered[Sequence], seen: Ordered[VerificationFeedback]
) -> list[int]:
    """Learn of a step of texts whose trees `propose_together` made, or that drafted nothing.

    Args:
        texts, sequences: [n] the texts, after the step.
        seen: [n] what became of their trees, with logits on the CPU.

    Returns:
        The numbers of the texts whose logits hold NaN, of which nothing is learned.
    """
    lib = library()
    assert lib is not None
    count, vocab = len(texts), seen[0].logits.shape[1]
    steps, arrays = (HappenedStruct * count)(), list[np.ndarray | torch.Tensor]()
    for step, text, seq, each in zip(steps, texts, sequences, seen, strict=True):
        text.stand(seq, each.start + 1)
        rows = len(each.tree)
        emitted, path = np.array(each.emitted, dtype=np.int64), np.array(each.path, dtype=np.int64)
        logits = each.logits.to(torch.float32).contiguous()
        arrays += [emitted, path, logits]
        step.emitted, step.count, step.rows = emitted.ctypes.data, len(emitted), rows
        step.tokens, step.parents = (address(part, np.int64, rows) for part in (each.tree.tokens, each.tree.parents))
        step.accepted, step.length = path.ctypes.data, len(path)
        step.logits = address(logits, torch.float32, rows, vocab)
    places = (c_void_p * count)(*(text.address for text in texts))
    begins = (c_void_p * count)(*(addressof(step) for step in steps))
    with Held(stores_of(texts)):
        width = min(texts[0].memory.contexts.width, vocab)
        failed = lib.decodery_learn(addressof(places), addressof(begins), count, vocab, width)
    return [number for number, step in enumerate(steps) if step.failed] if failed else []


def stores_of(texts: Ordered[NativeText]) -> list[Guarded]:
    """The stores that texts share, in the order in which every thread takes their locks."""
    stores = {id(store): store for text in texts for store in (text.memory.contexts, text.memory.past)}
    return [stores[name] for name in sorted(stores)]


class Held:
    """Stores that belong to one thread for a while, as a context; ExitStack takes a dozen calls for each.

    Args:
        stores: In the order in which every thread takes their locks.
    """

    def __init__(self, stores: Ordered[Guarded]) -> None:
        self._locks = [store.lock for store in stores]

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *error: object) -> None:
        for lock in self._locks:
            lock.release()
