"""Coupled verification: the request's seed decides every token, and a draft is kept where it guessed that token."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import ConstraintError
from decodery.core.registry import register
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


@register(
    "coupled",
    paper="A* Sampling (2014)",
    guarantee="seed-identical: the same tokens as plain decoding with the same seed, whatever drafted them",
    lossless=True,
)
@dataclass(frozen=True)
class Coupled(AcceptanceRule):
    """Draws each token by the Gumbel-max trick with noise hashed from seed, output position and token id.

    The token after a node is the argmax of its log-probabilities plus that noise (plain argmax when greedy); the walk
    follows the child that carries it and ends where there is none. No draft can change what is drawn.
    """

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        path: list[int] = []
        node = 0
        # On a CPU only visited nodes are worked out; elsewhere all at once, so that the device is read one time.
        known = None if laws.logits.device.type == "cpu" else _all_picks(laws)
        while True:
            token = known[node] if known else laws.picks([node])[0]
            child = tree.child(node, token)
            if child is None:
                return Accepted(path, token)
            path.append(child)
            node = child


def _all_picks(laws: NodeDistributions) -> list[int] | None:
    """The picks after every node; None if a constraint reaches its limits, even at an unvisited node."""
    try:
        return laws.picks(range(len(laws.tree)))
    except ConstraintError:
        return None
