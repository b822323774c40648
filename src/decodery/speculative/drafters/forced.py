"""Forced tokens: what a constraint leaves no choice about is drafted for nothing, before another drafter's guesses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from decodery.core.registry import register, resolve
from decodery.core.requirements import Provides
from decodery.sampling.constraint import constrained
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import MASK_TOKEN, DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

from .forced_batch import ForcedBatch, permitted


@register("forced", paper="SGLang: Efficient Execution of Structured Language Model Programs (2023)", lossless=True)
@dataclass(frozen=True)
class Forced(Composite):
    """Drafts the tokens a request's constraint forces, then what another drafter expects after them.

    Forced tokens are always accepted, so they cost no pass of their own. Deterministic drafts lose what the constraint
    forbids; others stay whole, as rules that sample need. Without a constraint it is the other drafter. Requests with a
    constraint and a drafter get it by themselves. Scope and memory: those of the other drafter.

    Attributes:
        drafter: The other one, as an instance or a text.
    """

    drafter: Drafter | str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", resolve("drafter", self.drafter))

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.drafter,)  # type: ignore[return-value]  # resolved above

    @property
    def provides(self) -> Provides:
        return Provides.merged((self.parts[0].provides, Provides(drafts=("deterministic",))))

    @property
    def keeps_logits(self) -> bool:
        return self.parts[0].keeps_logits

    @property
    def together(self) -> Hashable | None:
        return None if (own := self.parts[0].together) is None else ("forced", own)

    def batch(self, sequences: Ordered[Sequence], places: Ordered[int]) -> ForcedBatch | None:
        # By itself a text drafts after its forced tokens, too: that saves passes, and costs calls for each text.
        own = None if len(sequences) == 1 else self.parts[0].batch(sequences, places)
        return None if own is None else ForcedBatch(own, sequences, places)

    def asks(self, seq: Sequence) -> bool:
        return self.parts[0].asks(seq)

    def largest(self) -> None:
        """None: a constraint may force any number of tokens."""

    def start(self, seq: Sequence) -> int:
        """How many tokens of the step's draft were forced."""
        super().start(seq)
        return 0

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        found = constrained(seq.request.sampler.processors)
        if found is None:
            return (yield from self._draft(seq, budget))
        number, constraint = found
        forced = constraint.forced(seq.processor_states[number], min(budget.nodes, budget.depth))
        seq.states[self] = len(forced)
        left = replace(budget, nodes=budget.nodes - len(forced), depth=budget.depth - len(forced))
        if forced and (min(left.nodes, left.depth) < 1 or forced[-1] in seq.request.eos_ids):
            return self._behind(seq, forced, DraftTree.root(forced[-1]))
        with _ahead(seq, forced):
            tree = yield from self._draft(seq, left)
            if tree.origin == "deterministic":
                tree = permitted(tree, constraint, seq.processor_states[number])
        return self._behind(seq, forced, tree) if forced else tree

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        count, seq.states[self] = seq.states[self], 0
        if len(seen.emitted) > count or not count:
            super().observe(seq, _behind_forced(seen, count) if count else seen)

    def _draft(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        return (yield from as_coroutine(self.parts[0].propose(seq, budget)))

    def _behind(self, seq: Sequence, forced: list[int], tree: DraftTree) -> DraftTree:
        """`tree`, whose root is the last forced token, after the chain of them."""
        count = len(forced)
        tokens = np.concatenate(([seq.last_token], forced, tree.tokens[1:]))
        parents = np.concatenate((np.arange(-1, count), tree.parents[1:] + count))
        logq = None if tree.logq is None else np.concatenate((np.zeros(count), tree.logq))
        laws = {node + count: law for node, law in tree.distributions.items()}
        # The drafter may combine several: what it drafted this time says how its siblings arose.
        if seq.request.acceptance_rule.requirements.laws and tree.origin != "deterministic":
            for node, token in enumerate(forced):
                laws[node] = torch.zeros(seq.request.vocab_size, dtype=torch.float64, device="cpu")
                laws[node][token] = 1.0
        draws = {node + count: [child + count for child in drawn] for node, drawn in tree.draws.items()}
        return DraftTree(tokens, parents, tree.origin, logq, laws, draws, tree.inputs, tree.changes)


def unforced(drafter: Drafter) -> Drafter:
    """The drafter inside `Forced`, any other one as it is."""
    return drafter.parts[0] if isinstance(drafter, Forced) else drafter


def _behind_forced(seen: VerificationFeedback, count: int) -> VerificationFeedback:
    """What the other drafter learns: the tree below the last of `count` forced tokens, which was its own root."""
    inside = seen.tree.ancestor_mask()[:, count]
    nodes = np.flatnonzero(inside)
    place = np.full(len(inside) + 1, -1)
    place[nodes] = np.arange(len(nodes))
    own = seen.tree
    tree = DraftTree(
        own.tokens[nodes],
        place[np.where(nodes == count, -1, own.parents[nodes])],
        own.origin,
        None if own.logq is None else own.logq[nodes],
        {int(place[node]): law for node, law in own.distributions.items() if inside[node]},
        {int(place[node]): place[drawn].tolist() for node, drawn in own.draws.items() if inside[node]},
        None if own.inputs is None else own.inputs[torch.from_numpy(inside[own.tokens == MASK_TOKEN])],
    )
    return VerificationFeedback(
        tree=tree,
        logits=seen.logits[nodes],
        hidden={tap: rows[nodes] for tap, rows in seen.hidden.items()},
        path=place[[node for node in seen.path if node > count]].tolist(),
        emitted=seen.emitted[count:],
        start=seen.start + count,
    )


@contextmanager
def _ahead(seq: Sequence, tokens: list[int]) -> Iterator[None]:
    """The sequence as it will be once the forced tokens are text, which nothing can prevent."""
    before = seq.processor_states
    context = seq.request.sampler.ahead(seq.context(), tokens)
    seq.tokens.extend(tokens)
    seq.processor_states = context.state
    try:
        yield
    finally:
        seq.processor_states = before
        del seq.tokens[len(seq.tokens) - len(tokens) :]
