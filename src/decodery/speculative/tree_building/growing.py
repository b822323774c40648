"""Trees in the making: nodes are expanded in one pass, their children taken or drawn, and kept as they were drawn."""

from __future__ import annotations

import numpy as np
import torch

from decodery.core import noise
from decodery.core.topk import topk
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree, Origin
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.look_ahead import Ahead, Level
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter

from .template import Template


class Growing:
    """A tree of `expander`'s guesses below the last token.

    Greedy requests draw nothing: the most likely tokens come first, whatever the origin. Where the rule compares with
    the draft's distributions, every node draws with noise of its own, hashed from its path: were it shared, as the
    request's noise is by all nodes of a depth, what one node drew would tell what another one is about to draw, and
    trees shaped by what was drawn would bias the rule. Under other rules all nodes use the request's noise, so that the
    draft holds the very token the target will draw.

    Args:
        origin: "deterministic" takes the most likely tokens as children, the others draw them.
        draws: See `DraftTree`.
        tokens, parents, depths: [n] int64 of the nodes so far.
    """

    def __init__(self, expander: TreeDrafter, seq: Sequence, budget: Budget, origin: Origin, temperature: float = 1.0):
        self.expander, self.seq, self.budget, self.origin = expander, seq, budget, origin
        self.temperature = temperature
        self.tokens, self.parents, self.depths = np.array([seq.last_token]), np.array([-1]), np.array([0])
        self.draws: dict[int, list[int]] = {}
        self._places = [noise.mix(seq.position)]
        self._laws: dict[int, torch.Tensor] = {}
        self._ahead: Ahead | None = None
        self._eos = np.array(sorted(seq.request.eos_ids), dtype=np.int64)

    @property
    def room(self) -> int:
        """How many nodes the budget has left."""
        return self.budget.nodes + 1 - len(self.tokens)

    @property
    def by_chance(self) -> bool:
        """Whether children are drawn, not taken."""
        return self.origin != "deterministic" and not self.seq.request.sampler.greedy

    def open(self, nodes: np.ndarray) -> np.ndarray:
        """Those of `nodes` that may have children: neither at the greatest depth nor the end of the text."""
        return nodes[(self.depths[nodes] < self.budget.depth) & ~np.isin(self.tokens[nodes], self._eos)]

    def expand(self, nodes: np.ndarray) -> ForwardCoroutine[torch.Tensor]:
        """Log-probabilities [len(nodes), vocab] of children of `nodes`, stored as what they are drawn from.

        Of a greedy request they are sharpened by `temperature`, which changes no order.
        """
        laws = yield from self.expander.expand(self.seq, DraftTree(self.tokens, self.parents), nodes.tolist())
        if self.seq.request.sampler.greedy and self.temperature != 1.0:
            laws = (laws / self.temperature).log_softmax(dim=-1)
        if self.seq.request.acceptance_rule.requirements.laws and self.origin != "deterministic":
            self._laws.update(zip(nodes.tolist(), laws, strict=True))
        return laws

    def read_ahead(self, plan: tuple[Level, ...]) -> ForwardCoroutine[None]:
        """Let the drafter read levels before their nodes are known here, where it can.

        Args:
            plan: The root's level first.
        """
        if not self._whole:
            origin = self.origin if self.by_chance else "deterministic"
            reading = self.expander.read_ahead(self.seq, plan[: self.budget.depth], origin=origin)
            self._ahead = None if reading is None else (yield from reading)

    def _known(self, nodes: np.ndarray, width: int) -> list[np.ndarray] | None:
        """What was read ahead of the first children of `nodes`, see `Ahead.of`."""
        return None if self._ahead is None else self._ahead.of(self.tokens, self.parents, nodes.tolist(), width)

    def children(self, nodes: np.ndarray, width: int) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Expand `nodes` [m] and order up to `width` distinct children of each.

        Returns:
            Three arrays [m, width]: ids, -1 where a node has fewer children; their log-probabilities; and the scores
            that order them, log-probability plus noise.
        """
        if not self.by_chance:
            ids, logq = yield from self._most_likely(nodes, width)
            logq = logq.astype(np.float64)
            ids = np.where(np.isfinite(logq), ids, -1)
            return ids, logq, logq
        if (known := self._known(nodes, width)) is not None:
            ids, logq, scores = known
            drawn = np.isfinite(scores)
            return np.where(drawn, ids, -1), np.where(drawn, logq.astype(np.float64), -np.inf), scores
        laws = yield from self.expand(nodes)
        ids, scores = noise.gumbel_topk(laws, width, self.seq.request.seed, *self._noise(nodes))
        found = laws.gather(-1, torch.from_numpy(np.maximum(ids, 0)).to(laws.device)).double().cpu().numpy()
        return ids, np.where(ids >= 0, found, -np.inf), scores

    @property
    def _whole(self) -> bool:
        """Whether distributions are worked out whole: those that are remembered as drawn from, or sharpened."""
        sharpened = self.seq.request.sampler.greedy and self.temperature != 1.0
        return sharpened or (self.seq.request.acceptance_rule.requirements.laws and self.origin != "deterministic")

    def _most_likely(self, nodes: np.ndarray, width: int) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray]]:
        """The most likely children of `nodes` [m]: ids and log-probabilities [m, width]."""
        if (known := self._known(nodes, width)) is not None:
            ids, logq = known
            return ids, logq
        if self._whole:
            return topk((yield from self.expand(nodes)), width)
        tree = DraftTree(self.tokens, self.parents)
        return (yield from self.expander.most_likely(self.seq, tree, nodes.tolist(), width))

    def independent(self, nodes: np.ndarray, draws: int) -> ForwardCoroutine[np.ndarray]:
        """Expand `nodes` [m] and draw `draws` children of each, independent of each other: ids [m, draws]."""
        if (known := self._known(nodes, draws)) is not None:
            return known[0]
        laws = yield from self.expand(nodes)
        first, stream = self._noise(nodes)
        columns = []
        for number in range(draws):
            if number:
                # Below zero, where no token is: the noise of a child is hashed from the same place and its token.
                first, stream = [noise.mix(self._places[node], -number) for node in nodes.tolist()], noise.DRAFT
            columns.append(noise.gumbel_argmax(laws, self.seq.request.seed, first, stream).cpu().numpy())
        return np.stack(columns, axis=1)

    def add(self, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Add nodes, siblings in draw order; returns their numbers."""
        fresh = np.arange(len(self.tokens), len(self.tokens) + len(tokens))
        self._places += [
            noise.mix(self._places[parent], token)
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]
        self.depths = np.concatenate((self.depths, self.depths[parents] + 1))
        self.tokens = np.concatenate((self.tokens, tokens))
        self.parents = np.concatenate((self.parents, parents))
        return fresh

    def merge(self, parent: int, drawn: np.ndarray) -> list[int]:
        """Add independent draws [k] below `parent`, equal ones as one node; returns the node of every draw."""
        distinct = list(dict.fromkeys(drawn.tolist()))
        nodes = self.add(np.full(len(distinct), parent), np.array(distinct))
        place = dict(zip(distinct, nodes.tolist(), strict=True))
        self.draws[parent] = [place[token] for token in drawn.tolist()]
        return self.draws[parent]

    def fill(self, template: Template) -> ForwardCoroutine[DraftTree]:
        """The tree of the children at the template's ranks, a pass per level."""
        nodes = np.full(len(template.parents), -1)
        nodes[0] = 0
        yield from self.read_ahead(template.plan)
        for places, above, place in template.levels:
            alive = np.flatnonzero(nodes[above] >= 0)
            alive = alive[np.isin(nodes[above[alive]], self.open(nodes[above[alive]]))]
            if not len(alive):
                break
            width = int(template.ranks[places].max()) + 1
            ids = np.full((len(above), width), -1)
            found = (yield from self.children(nodes[above[alive]], width))[0]
            ids[alive, : found.shape[1]] = found
            tokens = ids[place, template.ranks[places]]
            there = tokens >= 0
            nodes[places[there]] = self.add(nodes[above[place[there]]], tokens[there])
        return self.finish()

    def finish(self) -> DraftTree:
        """The tree, with the distributions of all nodes that have children where the rule wants them."""
        laws = {}
        for node in np.unique(self.parents[1:]).tolist():
            if node in self._laws:
                law = self._laws[node].double().exp()
                laws[node] = law / law.sum()
        return DraftTree(self.tokens, self.parents, self.origin, None, laws, self.draws)

    def _noise(self, nodes: np.ndarray) -> tuple[list[int], int]:
        """Positions and stream of the noise that the children of `nodes` are drawn with."""
        if self.seq.request.acceptance_rule.requirements.laws:
            return [self._places[node] for node in nodes.tolist()], noise.DRAFT
        return (self.seq.position + self.depths[nodes]).tolist(), noise.TOKEN
