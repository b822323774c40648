"""Base class of acceptance rules, which walk the draft tree and decide which tokens become text."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import method_of
from decodery.core.requirements import Provides, Requirements
from decodery.core.trace import Step
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.sampling.logits_processor import Context

from .draft_tree import MASK_TOKEN, DraftTree
from .forward_request import ForwardCoroutine, score
from .sequence import Sequence

__all__ = ["AcceptanceRule", "Accepted", "NodeDistributions"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The decision of an acceptance rule.

    Attributes:
        path: Accepted nodes from the root down, without the root.
        bonus: The token after them, drawn from the target.
    """

    path: list[int]
    bonus: int


class OpenQuestion(Exception):
    """The distribution of a node needs a computation of its constraint that has not run yet.

    Args:
        question: See `Constraint.question`.
    """

    def __init__(self, question: Callable[[], object]) -> None:
        super().__init__("a question of the constraint has to be answered first")
        self.question = question


class NodeDistributions:
    """The target's distributions at the nodes of one tree, computed for the nodes that a rule visits.

    A node's distribution depends on its path: penalties count the path's tokens, and stateful processors have a state
    per node.

    Args:
        tree: The draft, whose nodes were scored.
        logits: [n, vocab] of the tree's nodes, the model's own.
        seq: The sequence that the tree continues.
        hidden: By layer, [n, hidden] of the tree's nodes, for the layers that the rule taps.
        first: Number of rows of the pass before the root.
        known: What the request's own noise chooses after each node, as far as the pass has found it.
    """

    def __init__(
        self,
        tree: DraftTree,
        logits: torch.Tensor,
        seq: Sequence,
        hidden: dict[Tap, torch.Tensor] | None = None,
        first: int = 0,
        known: Ordered[int] = (),
    ) -> None:
        self.tree = tree
        self.seq = seq
        self.hidden = hidden or {}
        self.first = first
        self._known = known
        self._contexts = {0: seq.context()}
        # A rule that grows the tree adds rows in parts; they are concatenated when all of them are needed.
        self._parts = [logits]
        self._starts = [0]

    @property
    def logits(self) -> torch.Tensor:
        """[n, vocab] of all nodes, the model's own."""
        if len(self._parts) > 1:
            self._parts, self._starts = [torch.cat(self._parts)], [0]
        return self._parts[0]

    def row(self, node: int) -> torch.Tensor:
        """[vocab] logits of a node, the model's own."""
        part = bisect_right(self._starts, node) - 1
        return self._parts[part][node - self._starts[part]]

    def grow(self, runs: Iterable[Ordered[int]]) -> ForwardCoroutine[None]:
        """Add continuations of the last token as paths below the root, and score them.

        Existing nodes keep their numbers. The new rows follow the tree's rows in the cache, so no row is computed
        twice. The ledger counts the pass.
        """
        seq, known = self.seq, len(self.tree)
        if seq.request.cache_policy is not None and seq.request.cache_policy.opens and not seq.position:
            raise SettingsError(
                "this acceptance rule adds rows after a prompt's last token, where the cache policy adds rows too: use "
                "another rule or another cache policy"
            )
        self.tree = self.tree.extended(runs)
        fresh = np.arange(known, len(self.tree))
        mask = np.zeros((len(fresh), self.first + len(self.tree)), dtype=bool)
        mask[:, : self.first] = True
        mask[:, self.first :] = self.tree.ancestor_mask()[known:]
        positions = seq.cache.next_position + self.first + self.tree.depths[fresh]
        segment = Segment(
            positions,
            self.tree.tokens[fresh],
            mask=mask,
            cache=seq.cache,
            retained=self.first + known,
            interventions=seq.interventions,
        )
        taps = tuple(self.hidden)
        scored = yield from score(seq.request.model, segment, taps)
        self._starts.append(known)
        self._parts.append(seq.writable(scored.logits))
        self.hidden = {tap: torch.cat((rows, scored.hidden[tap])) for tap, rows in self.hidden.items()}
        count("extra_passes")
        count("extra_rows", len(fresh))
        seq.trace.steps.append(Step(nodes=len(fresh), rows=len(fresh)))

    def context(self, node: int) -> Context:
        """History of the token to be chosen after `node`."""
        if node not in self._contexts:
            parent = int(self.tree.parents[node])
            before = self.context(parent)
            token = int(self.tree.tokens[node])
            # No token is drawn after a mask node; only a request for all rows includes one.
            known = token != MASK_TOKEN
            self._contexts[node] = self.seq.request.sampler.extend(before, token, self.row(parent)) if known else before
        return self._contexts[node]

    def position(self, node: int) -> int:
        """Output position of the token to be chosen after `node`."""
        return self.context(node).position

    def rows(self, nodes: Ordered[int]) -> torch.Tensor:
        """[k, vocab] processed logits, -inf where a token is excluded."""
        self.require_answers(nodes)
        return self.seq.request.sampler.law(self._own(nodes), [self.context(node) for node in nodes])

    def require_answers(self, nodes: Ordered[int]) -> None:
        """Raise OpenQuestion if the token after one of `nodes` needs a computation of the constraint first."""
        for node in nodes:
            question = self.seq.request.sampler.question(self.context(node).state)
            if question is not None:
                raise OpenQuestion(question)

    def _own(self, nodes: Ordered[int]) -> torch.Tensor:
        """[k, vocab] the model's own logits."""
        if isinstance(nodes, range):
            # A slice, because a list of indices would be copied to the device, which synchronises with it.
            return self.logits[nodes.start : nodes.stop : nodes.step]
        return self.row(nodes[0])[None] if len(nodes) == 1 else self.logits[list(nodes)]

    def probabilities(self, node: int) -> torch.Tensor:
        """[vocab] float64, summing to 1; one-hot for greedy decoding."""
        return self.seq.request.sampler.probabilities(self.rows([node]))[0]

    def picks(self, nodes: Ordered[int]) -> list[int]:
        """The token that the request's own noise (or, when greedy, the argmax) chooses after each of `nodes`."""
        found = [self._known[node] for node in nodes if node < len(self._known)]
        # Of a row without a largest number the sampler says what is wrong.
        if len(found) == len(nodes) and min(found, default=-1) >= 0:
            return found
        if self.seq.request.sampler.plain and self._parts[0].device.type == "cpu":
            return self.seq.request.sampler.largest(self._own(nodes))
        positions = [self.position(node) for node in nodes]
        return self.seq.request.sampler.pick(self.rows(nodes), self.seq.request.seed, positions).tolist()


@dataclass(frozen=True)
class AcceptanceRule(Contract):
    """Decides which drafted tokens become text.

    Subclasses declare `requirements = Requirements(greedy=True)`.
    """

    @property
    def requirements(self) -> Requirements:
        """Its requirements: the `drafts` that its guarantee covers, and `taps` for `NodeDistributions.hidden`."""
        return Requirements()

    @property
    def provides(self) -> Provides:
        """What it provides to constraints; without `mask` where it checks single tokens and needs none."""
        method = method_of(self)
        return Provides(checked=method is None or method.lossless, mask=True)

    def fits(self, model: Reader) -> None:
        """Raise SettingsError if it does not work with texts of `model`."""

    @abstractmethod
    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted | ForwardCoroutine[Accepted]:
        """Walk `tree` from its root.

        A rule that needs more rows first is a coroutine that calls `NodeDistributions.grow` any number of times; no
        token becomes text before it returns.

        Args:
            tree: The draft, rooted at the last token.
            laws: The target's distributions at its nodes.
            seq: The sequence, with its sampler, seed and position.

        Returns:
            The accepted path and the token that follows it.
        """
