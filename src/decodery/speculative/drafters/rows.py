"""Rows of a tree that grows between passes: which of its nodes were read already, and which were not requested yet."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
import torch

from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.look_ahead import Ahead


@dataclass(slots=True)
class TreeRows:
    """Rows of a tree by parent row (-1: the text's end) and token, and `spare` logits [outputs].

    Spare logits are not used yet. The root of a tree is text, and has no row, or (`rooted`) is read like its other
    nodes.
    """

    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    spare: dict[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def clear(self) -> None:
        self.rows, self.spare = {}, {}

    def hold(self, ahead: Ahead, logits: Ordered[torch.Tensor]) -> None:
        """Take what was read of a tree before any of it was asked for.

        Args:
            ahead: Which rows there are.
            logits: Of those of each level [n, outputs].
        """
        self.rows, self.spare = dict(ahead.rows), dict(enumerate(row for each in logits for row in each))

    def path(self, tokens: Ordered[int]) -> list[int]:
        """The rows of the tokens below the end of the text, as far as they were read."""
        found: list[int] = []
        for token in tokens:
            row = self.rows.get((found[-1] if found else -1, token))
            if row is None:
                break
            found.append(row)
        return found

    def after(
        self,
        cache: KVCache,
        tree: DraftTree,
        nodes: Ordered[int],
        read: Callable[[Segment], ForwardCoroutine[torch.Tensor]],
        root: torch.Tensor | None = None,
    ) -> ForwardCoroutine[torch.Tensor]:
        """The logits [k, vocab] after `nodes` of a tree after what a cache holds.

        `read` gives those of a segment.

        Args:
            root: [vocab] after the tree's root, where the cache holds that too; None: it gets a row like the others.
        """
        place, fresh = self.place(tree, nodes, rooted=root is None)
        found = torch.empty(0, dtype=torch.float32, device="cpu")
        if fresh:
            first = len(self.rows) - len(fresh)
            mask, positions = self.mask(tree, place, fresh), cache.next_position + tree.depths[fresh]
            segment = Segment(
                positions - (root is not None), tree.tokens[fresh], mask=mask, cache=cache, retained=first
            )
            try:
                found = yield from read(segment)
            except BaseException:
                # What was to be read has not been.
                self.rows = {key: row for key, row in self.rows.items() if row < first}
                raise
        return self.told(found, place, nodes, root)

    def place(self, tree: DraftTree, nodes: Ordered[int], *, rooted: bool = False) -> tuple[np.ndarray, list[int]]:
        """The row [n] of every node that is read with `nodes`, -1 for others, and nodes with new rows."""
        known = self._known(tree, rooted)
        if any(known.get(node, -1) >= 0 and known[node] not in self.spare for node in nodes):
            # What a row said has been told, and is not kept: its path is read again, parents before children.
            self.clear()
        place, fresh = np.full(len(tree), -1), list[int]()
        tokens, parents, depths = tree.tokens.tolist(), tree.parents.tolist(), tree.depths
        wanted = {above for each in nodes for above in tree.path(each)} | ({0} if rooted else set())
        # Level by level, for those that can read no row together with the one above it.
        for node in sorted(wanted, key=lambda node: (depths[node], node)):
            key = (int(place[parents[node]]) if node else -1, tokens[node])
            if key not in self.rows:
                self.rows[key] = len(self.rows)
                fresh.append(node)
            place[node] = self.rows[key]
        return place, fresh

    def mask(self, tree: DraftTree, place: np.ndarray, fresh: list[int]) -> np.ndarray:
        """[len(fresh), rows] bool: which rows those of the fresh nodes see, their own included."""
        mask = np.zeros((len(fresh), len(self.rows)), dtype=bool)
        fed = np.flatnonzero(place >= 0)
        mask[:, place[fed]] = tree.ancestor_mask()[fresh][:, fed]
        return mask

    def told(
        self, found: torch.Tensor, place: np.ndarray, nodes: Ordered[int], root: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits [k, outputs] after `nodes`.

        Args:
            found: Those of the newest rows.
            root: [outputs], of one without.
        """
        first = len(self.rows) - len(found)
        if len(found) and np.array_equal(place[list(nodes)], first + np.arange(len(found))):
            return found
        self.spare.update((first + row, logits) for row, logits in enumerate(found))
        known = [root if place[node] < 0 else self.spare.pop(int(place[node])) for node in nodes]
        return torch.stack([logits for logits in known if logits is not None])

    def _known(self, tree: DraftTree, rooted: bool) -> dict[int, int]:
        """The row of every node of a tree that has one; -1 for a root that has none because it is text."""
        known = {} if rooted else {0: -1}
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            above = known.get(parent) if node else -1
            if node not in known and above is not None and (row := self.rows.get((above, token))) is not None:
                known[node] = row
        return known
