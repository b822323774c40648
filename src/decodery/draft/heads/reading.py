"""What a draft head has read of one text, and of the drafts below its last token."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...core.sequence import Sequence
from ...core.topk import likeliest
from ...core.tree import TokenTree
from ...model.sites import Tap
from ...model.threads import one_thread
from ..base import Observation
from ..rows import TreeRows
from .head import DraftHead


@dataclass(slots=True)
class _Seen:
    """States after tokens of the text, the tokens that followed, and where the states stand."""

    states: dict[Tap, torch.Tensor]
    tokens: list[int]
    start: int


@dataclass(slots=True)
class HeadReading:
    """memory: the head's own. fresh: what was seen and not read yet, which waits until somebody asks.

    root: [outputs], the logits of what follows the text, None where nothing of it was read. rows: nodes of the tree.
    """

    head: DraftHead
    memory: Any
    fresh: list[_Seen] = field(default_factory=list)
    root: torch.Tensor | None = None
    rows: TreeRows = field(default_factory=TreeRows)

    @classmethod
    def begin(cls, head: DraftHead) -> HeadReading:
        return cls(head, head.begin())

    @property
    def empty(self) -> bool:
        """Whether there is nothing to guess from."""
        return self.root is None and not self.fresh

    @property
    def unread(self) -> int:
        """Tokens of the text that are to be read before anything can be said."""
        return sum(len(each.tokens) for each in self.fresh)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.head.watches(self.head.trained)

    def __deepcopy__(self, memo: dict[int, object]) -> HeadReading:
        return HeadReading(self.head, deepcopy(self.memory, memo), list(self.fresh), self.root)

    @one_thread()
    def see(self, seq: Sequence, seen: Observation) -> None:
        """Take the states of what became text; the text's next tokens are known."""
        rows = [0, *seen.path]
        tokens = seq.tokens[seen.start + 1 : seen.start + 1 + len(rows)]
        rows = rows[: len(tokens)]
        if rows:
            # Most of the time what was drafted first was right, and nothing has to be gathered.
            whole = rows[-1] == len(rows) - 1
            states = {tap: seen.hidden[tap][: len(rows)] if whole else seen.hidden[tap][rows] for tap in self.taps}
            self.fresh.append(_Seen(states, tokens, seen.start))

    @one_thread()
    def skip(self, most: int) -> None:
        """Never read more than the last `most` tokens of those that wait; what stood before them stays unknown."""
        over = self.unread - most
        while over > 0:
            first = self.fresh[0]
            cut = min(over, len(first.tokens))
            over -= cut
            if cut == len(first.tokens):
                self.fresh.pop(0)
            else:
                # Copies: what is not read need not be kept.
                states = {tap: rows[cut:].clone() for tap, rows in first.states.items()}
                self.fresh[0] = _Seen(states, first.tokens[cut:], first.start + cut)

    def after(self, tree: TokenTree, nodes: Ordered[int]) -> torch.Tensor:
        """The logits [k, outputs] after `nodes` of a tree below the end of the text: each node is read once."""
        with torch.no_grad(), one_thread():
            self._catch_up()
            assert self.root is not None
            if list(nodes) == [0]:
                return self.root[None]
            place, fresh = self.rows.place(tree, nodes)
            first, mask = len(self.rows) - len(fresh), self.rows.mask(tree, place, fresh)
            found = [self.root.new_empty(0, len(self.root))]
            levels = np.flatnonzero(np.diff(tree.depths[fresh])) + 1
            for begin, end in pairwise((0, *levels.tolist(), len(fresh))) if fresh else ():
                nodes_here, known = fresh[begin:end], mask[begin:end, : first + end]
                tokens, above = torch.from_numpy(tree.tokens[nodes_here]), place[tree.parents[nodes_here]]
                found.append(self.head.grow(self.memory, tokens, above, tree.depths[nodes_here], known))
            return self.rows.told(torch.cat(found), place, nodes, self.root)

    def likeliest(self, tree: TokenTree, nodes: Ordered[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k likeliest tokens [n, k] after each of `nodes`, and their probabilities at temperature 1."""
        logits = self.after(tree, nodes)
        places, chances = likeliest(logits, k)
        return (places if self.head.vocabulary is None else self.head.vocabulary.numpy()[places]), chances

    def _catch_up(self) -> None:
        if not self.fresh:
            return
        states = {tap: torch.cat([each.states[tap] for each in self.fresh]).to(self.head.dtype) for tap in self.taps}
        tokens = [token for each in self.fresh for token in each.tokens]
        positions = np.concatenate([np.arange(each.start, each.start + len(each.tokens)) for each in self.fresh])
        self.root = self.head.read(self.memory, states, torch.tensor(tokens), positions)
        self.fresh = []
        self.rows.clear()
