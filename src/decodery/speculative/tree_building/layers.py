"""Trees grown level by level with a drafter that can expand, wider than what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.look_ahead import Level
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter

from .frequency import best


@dataclass(frozen=True)
class Layers:
    """A grown tree.

    Attributes:
        scores: [n], log-probability of every node's path.
    """

    tree: DraftTree
    scores: np.ndarray

    def kept(self, nodes: int) -> DraftTree:
        """The `nodes` most likely nodes; a path is never more likely than its beginning, so they are a tree."""
        keep = np.zeros(len(self.tree), dtype=bool)
        keep[best(self.scores, nodes + 1)] = True
        return self.tree.prune(keep)


def grow_layers(
    expander: TreeDrafter,
    seq: Sequence,
    *,
    width: int,
    depth: int,
    stop: Callable[[int, float], bool] | None = None,
    kept: int | None = None,
    shaped: bool = True,
) -> ForwardCoroutine[Layers]:
    """Expand the `width` most likely nodes of each of `depth` levels into `width` children, a pass each.

    Args:
        stop: Asked after pass 0, 1, ... with the probability of the most likely new path; True ends the growth. None:
            nothing does.
        kept: What `Layers.kept` will be asked for; nodes whose children cannot be among them are not expanded.
        shaped: See `TreeDrafter.expand`.
    """
    tree, scores = DraftTree.root(seq.last_token), np.zeros(1)
    frontier, levels = np.zeros(1, dtype=np.int64), 0
    depth = min(depth, expander.reach(seq))
    ahead = None
    if stop is None and (reading := expander.read_ahead(seq, (Level(width, width),) * depth, shaped=shaped)):
        ahead = yield from reading
    while levels < depth and len(frontier):
        nodes = frontier.tolist()
        known = None if ahead is None else ahead.of(tree.tokens, tree.parents, nodes, width)
        ids, values = known or (yield from expander.most_likely(seq, tree, nodes, width, shaped=shaped))
        reached = scores[frontier, None] + values
        new = np.isfinite(reached)
        parents = np.broadcast_to(frontier[:, None], ids.shape)[new]
        added = reached[new]
        fresh = np.arange(len(tree), len(tree) + len(added))
        tree = DraftTree(np.concatenate((tree.tokens, ids[new])), np.concatenate((tree.parents, parents)))
        scores = np.concatenate((scores, added))
        if stop is not None and stop(levels, float(np.exp(added.max(initial=-np.inf)))):
            break
        levels += 1
        fresh = fresh[~np.isin(tree.tokens[fresh], list(seq.request.eos_ids))]
        frontier = fresh[best(scores[fresh], width)]
        if kept is not None and len(scores) > kept + 1:
            # No child is likelier than its parent, and of equals the earlier ones are kept.
            frontier = frontier[scores[frontier] > np.partition(scores, len(scores) - kept - 1)[len(scores) - kept - 1]]
    return Layers(tree, scores)
