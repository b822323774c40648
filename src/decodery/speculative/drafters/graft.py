"""Graft: where the draft model is unsure it stops early, and recycled successors take the places it leaves."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.drafter_memory import Scope
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter, expanding

from ..stores.adjacency import Adjacency
from ..tree_building.layers import grow_layers
from ..tree_building.template import RankRates, unbalanced

_RETRIEVED_DEPTH = 6


@register(
    "graft",
    paper="Draft Less, Retrieve More: Hybrid Tree Construction for Speculative Decoding (2026)",
    lossless=True,
    slower=True,
    requirements=("a drafter that can expand, such as draft-model",),
)
@dataclass(frozen=True)
class Graft(Composite):
    """Prunes a draft model's tree early where it is unlikely and fills it with past candidates.

    Memory: the drafter's, and 4 * vocabulary * successors bytes.

    Attributes:
        drafter: One that can expand.
        nodes: Drafted tokens per step, the drafter's and the retrieved ones.
        checkpoints, thresholds: After draft pass c the growth stops where its best path is less likely than the
            threshold.
        kept: How many of the `nodes` nodes are then the drafter's, by stage; the others hang below the root along Token
            Recycling's successors.
        width, depth: Its tree is grown over so many levels from the `width` most likely nodes of each.
        successors: How many are remembered per token. The split is published; the thresholds, the shape of the
            retrieved tree (levels shrink with 1 / sqrt(level)) and `successors` are not. The thresholds are those that
            make most tokens per time with the shipped draft, as `python benchmarks/draft/calibrate.py graft --problems
            20` finds them; the others are common values.
        scope: How long successors are kept.
    """

    drafter: Drafter | str
    nodes: int = 60
    checkpoints: tuple[int, ...] = (0, 1, 5)
    thresholds: tuple[float, ...] = (0.0, 0.02, 0.1)
    kept: tuple[int, ...] = (8, 24, 40)
    width: int = 10
    depth: int = 8
    successors: int = 8
    scope: Scope = "process"

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", expanding(self.drafter, "graft"))
        if not len(self.checkpoints) == len(self.thresholds) == len(self.kept):
            raise SettingsError("graft needs as many thresholds and kept counts as checkpoints")
        if min(self.nodes, self.width, self.depth, self.successors, *self.kept) < 1 or max(self.kept) > self.nodes:
            raise SettingsError("graft needs nodes, width, depth, successors and kept >= 1, and kept <= nodes")

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.drafter,)  # type: ignore[return-value]  # resolved above

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> Adjacency:
        def make() -> Adjacency:
            return Adjacency(seq.request.vocab_size, self.successors)

        super().start(seq)
        store: Adjacency = seq.request.memory.recall(
            self.scope, seq, ("graft", seq.request.vocab_size, self.successors), make
        )
        return store

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        nodes = min(self.nodes, budget.nodes)
        if min(nodes, budget.depth) < 1:
            return DraftTree.root(seq.last_token)
        stage: list[int] = []

        def stop(level: int, chance: float) -> bool:
            for number, (checkpoint, threshold) in enumerate(zip(self.checkpoints, self.thresholds, strict=True)):
                if checkpoint == level and chance < threshold:
                    stage.append(number)
                    return True
            return False

        (drafter,) = self.parts
        assert isinstance(drafter, TreeDrafter)
        # Of no level more than `nodes` can be kept, and what is expanded is held.
        width, depth = min(self.width, nodes), min(self.depth, budget.depth)
        layers = yield from grow_layers(drafter, seq, width=width, depth=depth, stop=stop)
        if not stage:
            return layers.kept(nodes)
        # A smaller budget is split as the whole one is.
        drafted = layers.kept(max(1, nodes * self.kept[stage[0]] // self.nodes))
        return self._graft(seq, drafted, nodes, budget.depth)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        super().observe(seq, seen)
        seq.states[self].learn(seen)

    def _graft(self, seq: Sequence, drafted: DraftTree, nodes: int, depth: int) -> DraftTree:
        """Merge retrieved nodes in at the root; what both have leaves room for as many further ones."""
        free = nodes + 1 - len(drafted)
        merged = drafted.merge(self._retrieved(seq, free, depth))
        shared = nodes + 1 - len(merged)
        if shared > 0:
            merged = drafted.merge(self._retrieved(seq, free + shared, depth))
        end = nodes + 1
        return DraftTree(merged.tokens[:end], merged.parents[:end])

    def _retrieved(self, seq: Sequence, nodes: int, depth: int) -> DraftTree:
        if nodes < 1:
            return DraftTree.root(seq.last_token)
        store: Adjacency = seq.states[self]
        template = unbalanced(nodes, _RETRIEVED_DEPTH, self.successors)
        limits = Budget(nodes, depth)
        tree, _ = template.fill(
            seq.last_token,
            lambda places, tokens: store.successors(tokens[places]),
            RankRates(store.width).rates,
            limits,
            eos_ids=seq.request.eos_ids,
        )
        return tree
