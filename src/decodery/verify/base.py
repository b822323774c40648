"""What a verification rule is: it walks the drafted tree and decides what becomes text."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..core.sequence import Sequence
from ..core.tree import Origin, TokenTree
from ..sample.base import Context

if TYPE_CHECKING:
    from ..model.protocol import LanguageModel


@dataclass(frozen=True, slots=True)
class Accepted:
    """path: accepted nodes, top down, the root left out. bonus: the token after them, drawn from the target."""

    path: list[int]
    bonus: int


@dataclass(frozen=True, slots=True)
class Undecided:
    """A rule's wish to see more rows: a further pass scores `tree`, and the rule is asked again.

    tree: rooted at the pending token. notes: what the rule wants to find in `seq.asked` then.
    """

    tree: TokenTree
    notes: Any = None


class Laws:
    """The target's distributions at the nodes of one sequence's tree, worked out for the nodes a rule visits.

    A node's law depends on its own path: penalties count the path's tokens, stateful warps own a state per node.
    hidden: {layer: [n, hidden]} of the tree's nodes, as the rule tapped.
    """

    def __init__(
        self, tree: TokenTree, logits: torch.Tensor, seq: Sequence, hidden: dict[int, torch.Tensor] | None = None
    ) -> None:
        self.tree = tree
        self.logits = logits
        self.seq = seq
        self.hidden = hidden or {}
        self._contexts = {0: seq.context()}

    def context(self, node: int) -> Context:
        """History of the token to be chosen after `node`."""
        if node not in self._contexts:
            parent = int(self.tree.parents[node])
            before = self.context(parent)
            token = int(self.tree.tokens[node])
            self._contexts[node] = self.seq.sampler.extend(before, token, self.logits[parent])
        return self._contexts[node]

    def position(self, node: int) -> int:
        """Output position of the token to be chosen after `node`."""
        return self.context(node).position

    def rows(self, nodes: Ordered[int]) -> torch.Tensor:
        """[k, vocab] warped logits, -inf where a token is excluded."""
        if isinstance(nodes, range):
            # A slice; a list of indices would have to be sent to the device, and waited for.
            rows = self.logits[nodes.start : nodes.stop : nodes.step]
        else:
            rows = self.logits[nodes[0] : nodes[0] + 1] if len(nodes) == 1 else self.logits[list(nodes)]
        return self.seq.sampler.law(rows, [self.context(node) for node in nodes])

    def probabilities(self, node: int) -> torch.Tensor:
        """[vocab] float64, summing to 1; one-hot for greedy decoding."""
        return self.seq.sampler.probabilities(self.rows([node]))[0]

    def picks(self, nodes: Ordered[int]) -> list[int]:
        """The token that the request's own noise (or, when greedy, the argmax) chooses after each of `nodes`."""
        positions = [self.position(node) for node in nodes]
        return self.seq.sampler.pick(self.rows(nodes), self.seq.seed, positions).tolist()


@dataclass(frozen=True)
class Rule:
    """A verification rule. origins: how siblings may have arisen for the rule to keep its guarantee.

    taps: after how many layers it wants the target's hidden states, which `Laws.hidden` then holds. greedy_only:
    whether it leaves nothing to chance, so that a temperature would be ignored. draws: whether it does nothing without
    a temperature. checks: whether it asks a constraint about single tokens, so that nobody else should work out masks
    for it.
    """

    origins: ClassVar[frozenset[Origin]] = frozenset({"deterministic", "sampled", "without-replacement"})
    uses_draft_distributions: ClassVar[bool] = False
    taps: ClassVar[tuple[int, ...]] = ()
    greedy_only: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    checks: ClassVar[bool] = False

    def fits(self, model: LanguageModel) -> None:
        """Raise SettingsError where this is not for texts of `model`."""

    def choose(self, tree: TokenTree, laws: Laws, seq: Sequence) -> Accepted | Undecided:
        """Walk `tree` from its root; returns the accepted path and the token that follows it.

        A rule that must see more first says so, as often as it needs to; nothing becomes text before it decides.
        """
        raise NotImplementedError
