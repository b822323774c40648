"""STAND: samples from the model's own past distributions, remembered by n-gram."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from decodery.core import noise
from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.sampling.temperature import Temperature
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.drafter_memory import Scope
from decodery.step.sequence import Sequence

from ..stores.distributions import MeanDistributions
from ..tree_building.template import STAND as CALIBRATED
from ..tree_building.template import RankRates, Template

_CONTEXTS = 1 << 15


@dataclass(frozen=True, slots=True)
class _Store:
    means: MeanDistributions
    rates: RankRates


@dataclass(slots=True)
class _Memory:
    """store: shared by the texts of one scope. places: [n] in the shape, of the last draft's nodes."""

    store: _Store
    places: np.ndarray


@dataclass(slots=True)
class _Draws:
    """What the nodes of one draft's children were drawn from, by template node: ids and log-probabilities [width]."""

    ids: dict[int, np.ndarray] = field(default_factory=dict)
    logq: dict[int, np.ndarray] = field(default_factory=dict)


@register(
    "stand",
    paper="Accelerated Test-Time Scaling with Model-Free Speculative Sampling (2025)",
    guarantee="the output distribution is unchanged; siblings are draws without replacement",
    lossless=True,
    slower=True,
)
@dataclass(frozen=True)
class STAND(Drafter):
    """Samples children from the mean of the model's own distributions after the same few tokens.

    Children are drawn without replacement by Gumbel-top-k from the stored mean, raised to 1 / temperature, with the
    request's own noise: under the coupled rule the first child is then the token to come wherever the stored
    distribution is right. Greedy decoding takes the most likely ones. The paper's tree, the 80 places most often right
    of 625 in 30 calibration runs, is not published; this one was found in the same way for the embedded model (`python
    benchmarks/draft/calibrate.py stand --problems 29`). Of fewer nodes those at the ranks that were right most often
    are fed. Memory: 32,768 contexts, about 100 bytes each and a dictionary entry; those not met for longest leave
    first.

    Attributes:
        orders: How many tokens a context has, the longest known one counts.
        width: Entries kept per context.
        nodes: At most so many nodes.
        scope: How long means are kept; by default as long as texts have the same prompt.
    """

    orders: tuple[int, ...] = (4, 3, 2)
    width: int = 10
    nodes: int = 80
    scope: Scope = "problem"

    shape: ClassVar[Template] = CALIBRATED
    requirements = Requirements(prompt=True)
    provides = Provides(drafts=("without-replacement",))

    def __post_init__(self) -> None:
        if not self.orders or min(self.orders) < 1 or self.width < 1:
            raise SettingsError("stand needs orders >= 1 and width >= 1")
        self.shape.require("stand", self.nodes)
        object.__setattr__(self, "orders", tuple(sorted(self.orders, reverse=True)))

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> _Memory:
        def make() -> _Store:
            return _Store(MeanDistributions(self.width, _CONTEXTS), RankRates(self.width))

        key = ("stand", seq.request.vocab_size, self.orders, self.width)
        return _Memory(seq.request.memory.recall(self.scope, seq, key, make), np.array([0]))

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        memory: _Memory = seq.states[self]
        temperature = _temperature(seq)
        contexts = {0: tuple(seq.tokens[-self.orders[0] :])}
        places = {0: noise.mix(seq.position)}
        draws = _Draws()

        def children(nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            for node in nodes.tolist():
                if node:
                    parent, token = int(self.shape.parents[node]), int(tokens[node])
                    contexts[node] = (*contexts[parent], token)[-self.orders[0] :]
                    places[node] = noise.mix(places[parent], token)
            ids, weights = memory.store.means.longest([contexts[node] for node in nodes.tolist()], self.orders)
            ids = ids.astype(np.int64)
            with np.errstate(divide="ignore"):
                logq = np.log(weights.astype(np.float64)) / (temperature or 1.0)
            logq -= np.logaddexp.reduce(logq, axis=1, keepdims=True, where=ids >= 0, initial=-1e300)
            keys = logq
            if temperature:
                keys = logq + _gumbel(
                    seq, int(self.shape.depths[nodes[0]]), [places[node] for node in nodes.tolist()], ids
                )
            order = np.argsort(np.where(ids >= 0, -keys, np.inf), axis=1, kind="stable")
            ids, logq = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logq, order, axis=1)
            draws.ids.update(zip(nodes.tolist(), ids, strict=True))
            draws.logq.update(zip(nodes.tolist(), logq, strict=True))
            return ids

        limits = Budget(min(self.nodes, budget.nodes), budget.depth)
        # A place may be worth no more than an earlier sibling's: leaving one out of the middle would bias rules.
        rates = np.minimum.accumulate(memory.store.rates.rates)
        tree, filled = self.shape.fill(
            seq.last_token, children, rates, limits, eos_ids=seq.request.eos_ids, origin=self.provides.drafts[0]
        )
        memory.places = filled
        return _with_law(tree, filled, draws, seq) if seq.request.acceptance_rule.requirements.laws else tree

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        memory: _Memory = seq.states[self]
        if len(seen.tree) == len(memory.places) > 1:
            ranks = self.shape.ranks[memory.places[seen.path]]
            memory.store.rates.learn(np.append(ranks, self.width) if len(ranks) < len(seen.emitted) else ranks)
        memory.store.means.observe(seq.tokens, seen, self.orders)


def _gumbel(seq: Sequence, depth: int, places: list[int], ids: np.ndarray) -> np.ndarray:
    """Noise [m, width] of the successors `ids` of m nodes at `depth`, whose paths are hashed in `places`.

    The request's own, or where the rule compares with the draft's distributions, noise of each node's own: which places
    the budget leaves depends on what was drawn at others, and may not depend on what is about to be.
    """
    if seq.request.acceptance_rule.requirements.laws:
        rows = [
            noise.gumbel(seq.request.seed, place, torch.from_numpy(row), noise.DRAFT)
            for place, row in zip(places, ids, strict=True)
        ]
        return torch.stack(rows).numpy()
    return noise.gumbel(seq.request.seed, seq.position + depth, torch.from_numpy(ids)).numpy()


def _temperature(seq: Sequence) -> float:
    """Of the request's sampler; 0 is greedy, 1 stands for none."""
    if seq.request.sampler.greedy:
        return 0.0
    return next(
        (processor.t for processor in seq.request.sampler.processors if isinstance(processor, Temperature)), 1.0
    )


def _with_law(tree: DraftTree, filled: np.ndarray, draws: _Draws, seq: Sequence) -> DraftTree:
    """The tree with the distributions its children were drawn from, one-hot ones included when greedy."""
    laws: dict[int, torch.Tensor] = {}
    logq = np.zeros(len(tree))
    for node, slot in enumerate(filled.tolist()):
        children = tree.children(node)
        if not len(children):
            continue
        ids, row = draws.ids[slot], draws.logq[slot]
        law = torch.zeros(seq.request.vocab_size, dtype=torch.float64, device="cpu")
        law[torch.from_numpy(ids[ids >= 0])] = torch.from_numpy(np.exp(row[ids >= 0]))
        laws[node] = law
        places = {token: place for place, token in enumerate(ids.tolist())}
        logq[children] = [row[places[token]] for token in tree.tokens[children].tolist()]
    return DraftTree(tree.tokens, tree.parents, tree.origin, logq, laws)
