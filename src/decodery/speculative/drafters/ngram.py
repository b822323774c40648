"""An n-gram model of what this model says: expectations remembered by the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Scope
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter

from ..stores.distributions import MeanDistributions

_CONTEXTS = 1 << 16
_UNIFORM = 100.0
"""How many tokens seen the uniform distribution counts as beneath the frequencies of single tokens."""


@dataclass(slots=True)
class _Store:
    """means: expectations by context; counts: [vocab] how often each token was written or read."""

    means: MeanDistributions
    counts: np.ndarray


@register("ngram", lossless=True)
@dataclass(frozen=True)
class NGram(TreeDrafter):
    """Drafts from averaged model distributions after the same few tokens, mixed over several orders.

    Learned from every scored row, those of rejected drafts and of the prompt included. Any node of any tree is expanded
    without a model, so that trees cost next to nothing. Memory: 65,536 contexts of 8 * width bytes and a dictionary
    entry, those not met for longest leave first, and 8 bytes per token of the vocabulary.

    Attributes:
        orders: Lengths of the contexts, each of which leaves the share `smoothing`, and whatever lies outside its
            `width` most likely tokens, to the next shorter one; beneath them all stand the frequencies of single tokens
            and the uniform distribution.
        width: Tokens kept per context.
        smoothing: The share that each order leaves to the next shorter one, between 0 and 1.
        scope: How long it is remembered.
        length, tree_policy: See `draft-model`.
    """

    orders: tuple[int, ...] = (4, 3, 2, 1)
    width: int = 16
    smoothing: float = 0.1
    scope: Scope = "process"

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged((super().requirements, Requirements(prompt=True)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.orders or min(self.orders) < 1 or self.width < 1 or not 0 < self.smoothing < 1:
            raise SettingsError("ngram needs orders >= 1, width >= 1 and smoothing between 0 and 1")
        object.__setattr__(self, "orders", tuple(sorted(set(self.orders), reverse=True)))

    def start(self, seq: Sequence) -> _Store:
        def make() -> _Store:
            return _Store(MeanDistributions(self.width, _CONTEXTS), np.zeros(seq.request.vocab_size))

        key = ("ngram", seq.request.vocab_size, self.orders, self.width)
        store: _Store = seq.request.memory.recall(self.scope, seq, key, make)
        return store

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        store: _Store = seq.states[self]
        endings = []
        for node in nodes:
            path = tree.tokens[tree.path(node)[-self.orders[0] :]].tolist()
            endings.append(tuple([*seq.tokens[-self.orders[0] :], *path][-self.orders[0] :]))
        rest = np.ones(len(endings), dtype=np.float32)
        found = []
        for order in self.orders:
            ids, weights = store.means.longest(endings, (order,))
            weights *= (1.0 - self.smoothing) * rest[:, None]
            rest -= weights.sum(axis=1)
            found.append((ids, weights))
        counts = store.counts + _UNIFORM / len(store.counts)
        rows = rest[:, None] * (counts / counts.sum()).astype(np.float32)
        for ids, weights in found:
            row, column = np.nonzero(ids >= 0)
            # A context names every token once, so nothing is added twice at one place.
            rows[row, ids[row, column]] += weights[row, column]
        return torch.from_numpy(np.log(rows, out=rows)).to(seq.request.model.device)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        store: _Store = seq.states[self]
        store.means.observe(seq.tokens, seen, self.orders)
        np.add.at(store.counts, [*seen.tree.tokens[[0, *seen.path]]], 1.0)
