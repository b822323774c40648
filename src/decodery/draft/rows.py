"""The nodes of a draft that a model has read: tentative rows behind a text, each read once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.ask import Asking
from ..core.tree import TokenTree
from ..model.batch import Segment
from ..model.cache import KVCache


@dataclass(slots=True)
class Rows:
    """Tentative rows of one cache. places: by the row above (-1: the end of the text) and the token.

    spare: logits [vocab] of rows nobody has asked for yet.
    """

    places: dict[tuple[int, int], int] = field(default_factory=dict)
    spare: dict[int, torch.Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.places, self.spare = {}, {}

    def after(
        self,
        cache: KVCache,
        tree: TokenTree,
        nodes: Ordered[int],
        read: Callable[[Segment], Asking[torch.Tensor]],
        root: torch.Tensor | None = None,
    ) -> Asking[torch.Tensor]:
        """The logits [k, vocab] after `nodes` of a tree behind what the cache holds; `read` gives those of a segment.

        root: [1, vocab] after the tree's root, where the cache holds that too; None: it gets a row like the others.
        """
        place, fresh = self._places(tree, nodes, rooted=root is None)
        found = torch.empty(0)
        if len(fresh):
            first = len(self.places) - len(fresh)
            mask = np.zeros((len(fresh), len(self.places)), dtype=bool)
            fed = np.flatnonzero(place >= 0)
            mask[:, place[fed]] = tree.ancestor_mask()[fresh][:, fed]
            positions = cache.next_position + tree.depths[fresh] - (root is not None)
            try:
                found = yield from read(Segment(positions, tree.tokens[fresh], mask=mask, cache=cache, stays=first))
            except BaseException:
                # What was to be read has not been.
                self.places = {key: row for key, row in self.places.items() if row < first}
                raise
            wanted = place[list(nodes)]
            if np.array_equal(wanted, first + np.arange(len(fresh))):
                return found
            self.spare.update((first + row, logits) for row, logits in enumerate(found))
        known = [None if place[node] < 0 else self.spare.pop(int(place[node])) for node in nodes]
        return torch.stack([logits if logits is not None else root[0] for logits in known])  # type: ignore[index]

    def _places(self, tree: TokenTree, nodes: Ordered[int], *, rooted: bool) -> tuple[np.ndarray, list[int]]:
        """The row [n] of every node that is read with `nodes`, -1 for others, and the nodes that get a row now."""
        known = self._known(tree, rooted)
        if any(known.get(node, -1) >= 0 and known[node] not in self.spare for node in nodes):
            # What a row said has been told, and is not kept: its path is read again, parents before children.
            self.clear()
        place, fresh = np.full(len(tree), -1), []
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        for node in sorted({above for each in nodes for above in tree.path(each)} | ({0} if rooted else set())):
            key = (int(place[parents[node]]) if node else -1, tokens[node])
            if key not in self.places:
                self.places[key] = len(self.places)
                fresh.append(node)
            place[node] = self.places[key]
        return place, fresh

    def _known(self, tree: TokenTree, rooted: bool) -> dict[int, int]:
        """The row of every node of a tree that has one; -1 for a root that has none because it is text."""
        known = {} if rooted else {0: -1}
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            above = known.get(parent) if node else -1
            if node not in known and above is not None and (row := self.places.get((above, token))) is not None:
                known[node] = row
        return known
