"""RASD: a draft model's tree, and beside it what a text or a corpus continues with, where the draft model agrees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.topk import topk
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter, expanding

from ..stores.datastore import Datastore
from ..stores.windows import Windows
from ..tree_building.frequency import Counted, count_prefixes
from ..tree_building.layers import grow_layers


@register(
    "rasd",
    paper="RASD: Retrieval-Augmented Speculative Decoding (2025)",
    lossless=True,
    slower=True,
    requirements=("a drafter that can expand, such as draft-model",),
)
@dataclass(frozen=True)
class RASD(Composite):
    """Prunes retrieved continuations by a draft model's first distribution and fuses them with its tree.

    The paper's own settings are not public: the numbers are those of its parts. Scope: the request; memory: the
    drafter's, and 8 bytes per token.

    Attributes:
        drafter: One that can expand.
        datastore: A folder made by `decodery train datastore`; without one the text itself is searched.
        width, depth: Its tree is grown over so many levels from the `width` most likely nodes of each.
        candidates: A retrieved branch whose first token is not among so many most likely ones is pruned, unless the
            draft model has no word for that token or at least `trusted` tokens matched. A node is worth the probability
            of its branch's first token times its share of the branch; the branch's share of all that was found takes
            the place of a probability where there is none, or none as large after a trusted match. The shipped draft
            prunes what is right at any length of match, hence trusted=1: with a draft to rely on, raise it.
        trusted: Length of a match from which a retrieved branch is not pruned.
        longest, shortest: How many tokens must match, by default 16 to 2 in a datastore and 3 to 1 in the text.
        continuations, length: So many occurrences are looked at, so far ahead.
        retrieved: So many of the `nodes` nodes are retrieved.
        nodes: Drafted tokens per step.
    """

    drafter: Drafter | str
    datastore: str | None = None
    width: int = 10
    depth: int = 6
    candidates: int = 10
    trusted: int = 1
    longest: int | None = None
    shortest: int | None = None
    continuations: int = 5000
    length: int = 10
    retrieved: int = 20
    nodes: int = 60

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", expanding(self.drafter, "rasd"))
        object.__setattr__(self, "longest", self.longest or (3 if self.datastore is None else 16))
        object.__setattr__(self, "shortest", self.shortest or (1 if self.datastore is None else 2))
        counts = [self.width, self.depth, self.candidates, self.trusted]
        counts += [self.continuations, self.length, self.retrieved]
        if min(counts) < 1 or self.nodes <= self.retrieved or not 1 <= self._lengths[0] <= self._lengths[1]:
            raise SettingsError(
                "rasd needs width, depth, candidates, trusted, continuations, length and retrieved >= 1, "
                "nodes > retrieved, and 1 <= shortest <= longest"
            )

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.drafter,)  # type: ignore[return-value]  # resolved above

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> Windows | Datastore:
        super().start(seq)
        if self.datastore is None:
            return Windows()
        store = Datastore.open(self.datastore)
        store.fits(seq.request.vocab_size)
        return store

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        nodes = min(self.nodes, budget.nodes)
        if min(nodes, budget.depth) < 1:
            return DraftTree.root(seq.last_token)
        (drafter,) = self.parts
        assert isinstance(drafter, TreeDrafter)
        # Of no level more than `nodes` can be kept, and what is expanded is held.
        width, depth = min(self.width, nodes), min(self.depth, budget.depth)
        first = (yield from drafter.expand(seq, DraftTree.root(seq.last_token), [0]))[0].cpu().numpy()
        layers = yield from grow_layers(drafter, seq, width=width, depth=depth)
        matched, windows = self._windows(seq, min(self.length, budget.depth))
        found, most = count_prefixes(windows, seq.request.vocab_size), nodes * self.retrieved // self.nodes
        retrieved = self._pruned(seq.last_token, found, first, most, trusted=matched >= self.trusted)
        return layers.kept(nodes - (len(retrieved) - 1)).merge(retrieved)

    def _pruned(self, last_token: int, found: Counted, first: np.ndarray, nodes: int, *, trusted: bool) -> DraftTree:
        """The retrieved nodes worth most, of branches the draft model would begin with or cannot judge."""
        if not len(found.tokens):
            return DraftTree.root(last_token)
        branch = np.arange(len(found.tokens))
        for depth in range(2, int(found.depths.max()) + 1):
            below = found.depths == depth
            branch[below] = branch[found.parents[below]]
        begins = found.tokens[branch]
        most_likely, _ = topk(torch.from_numpy(first)[None], self.candidates)
        belief = np.where(np.isin(begins, most_likely[0]), np.exp(first[begins].astype(np.float64)), 0.0)
        shares = found.counts[branch] / found.counts[found.depths == 1].sum()
        unjudged = np.isneginf(first[begins])
        belief = np.where(unjudged | trusted, np.maximum(belief, shares), belief)
        values = belief * found.counts / found.counts[branch]
        return found.tree(last_token, values, min(nodes, int((values > 0).sum())))

    def _windows(self, seq: Sequence, length: int) -> tuple[int, np.ndarray]:
        """How many of the last tokens were found, and what followed them."""
        source, (shortest, longest) = seq.states[self], self._lengths
        windows = np.empty((0, length), dtype=np.int64)
        if isinstance(source, Datastore):
            if matched := source.longest(seq.tokens[-longest:], shortest):
                windows = source.continuations(seq.tokens[-matched:], self.continuations, length)
            return matched, windows
        source.extend(seq.tokens)
        for n in range(longest, shortest - 1, -1):
            windows = source.continuations(n, self.continuations, length)
            if len(windows):
                return n, windows
        return 0, windows

    @property
    def _lengths(self) -> tuple[int, int]:
        assert self.shortest is not None and self.longest is not None
        return self.shortest, self.longest
