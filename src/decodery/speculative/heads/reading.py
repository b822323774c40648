"""What a draft head has read of one text, and of the drafts below its last token."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from decodery.core.threads import one_thread
from decodery.core.topk import most_likely
from decodery.models.hooks import Tap
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.sequence import Sequence
from decodery.step.wanted import RowChoices

from ..drafters.advice import Opinion
from ..drafters.rows import TreeRows
from .grown import DraftHead, Nodes
from .head import EMBEDDED, Heard, Seen

Steps = Generator[Nodes | None, torch.Tensor | None, torch.Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class HeadReading:
    """What a head has read of a text.

    Attributes:
        memory: The head's own.
        fresh: What was seen and not read yet, until it is needed.
        root: What is expected to follow the text, None where nothing of it was read.
        rows: Nodes of the tree.
        told: Of each node whose logits were asked for last its row, -1 of the root.
        ranks: The most likely tokens after rows and their probabilities, where a pass of several texts has ranked them.
        ahead: The same by depth, where nodes change nothing of it.
        choices: What a pass has found of what was wanted of its rows.
        most: How many of these were asked for at most.
    """

    head: DraftHead
    memory: Any
    fresh: list[Seen] = field(default_factory=list)
    root: Heard | None = None
    rows: TreeRows = field(default_factory=TreeRows)
    told: list[int] = field(default_factory=list)
    ranks: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    ahead: list[tuple[list[int], list[float]]] = field(default_factory=list)
    choices: RowChoices | None = None
    most: int = 0

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

    def see(self, seq: Sequence, seen: VerificationFeedback) -> None:
        """Take the states of what became text; the text's next tokens are known."""
        rows = [0, *seen.path]
        tokens = seq.tokens[seen.start + 1 : seen.start + 1 + len(rows)]
        if tokens:
            hidden = {tap: seen.hidden[tap] for tap in self.taps}
            if self.head.sees_embeddings and seq.request.prompt_embeds is not None:
                hidden[EMBEDDED] = seq.request.prompt_embeds.behind(seen.start, len(seen.tree))
            self.fresh.append(Seen(hidden, rows[: len(tokens)], tokens, seen.start))

    def skip(self, most: int) -> None:
        """Never read more than the last `most` tokens of those that wait.

        What stood before them stays unknown.
        """
        over = self.unread - most
        while over > 0:
            first = self.fresh[0]
            cut = min(over, len(first.tokens))
            over -= cut
            if cut == len(first.tokens):
                self.fresh.pop(0)
            else:
                # Copies: what is not read need not be kept.
                rows, left = list(first.rows[cut:]), range(len(first.tokens) - cut)
                with one_thread():
                    hidden = {tap: states[rows] for tap, states in first.hidden.items()}
                self.fresh[0] = Seen(hidden, left, first.tokens[cut:], first.start + cut)

    def steps(self, tree: DraftTree, nodes: Ordered[int]) -> Steps:
        """The logits [k, outputs] after `nodes` of a tree below the end of the text: each node is read once.

        Yields what is to be read first: None for the text, and nodes level by level, for which it is sent `answer`.
        """
        if self.fresh:
            yield None
        assert self.root is not None
        if list(nodes) == [0]:
            self.told = [-1]
            return self.root.logits[None]
        place, fresh = self.rows.place(tree, nodes)
        first, mask = len(self.rows) - len(fresh), self.rows.mask(tree, place, fresh)
        found = [self.root.logits.new_empty(0, len(self.root.logits))]
        levels = np.flatnonzero(np.diff(tree.depths[fresh])) + 1
        for begin, end in pairwise((0, *levels.tolist(), len(fresh))) if fresh else ():
            nodes_here, known = fresh[begin:end], mask[begin:end, : first + end]
            tokens, above = torch.from_numpy(tree.tokens[nodes_here]), place[tree.parents[nodes_here]]
            for row in range(first + begin, first + end):
                self.ranks.pop(row, None)
            logits = yield Nodes(self.memory, tokens, above, tree.depths[nodes_here], known)
            assert logits is not None
            found.append(logits)
        self.told = place[list(nodes)].tolist()
        return self.rows.told(torch.cat(found), place, nodes, self.root.logits)

    def answer(self, wanted: Nodes | None) -> torch.Tensor | None:
        """Read the text where `wanted` is None, else nodes, whose logits [n, outputs] it gives."""
        if wanted is None:
            read_all([self])
            return None
        return self.head.grown([wanted])[0]

    def after(self, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        """The logits [k, outputs] after `nodes` of a tree, by passes over this text alone."""
        steps, found = self.steps(tree, nodes), None
        try:
            while True:
                found = self.answer(steps.send(found))
        except StopIteration as stop:
            return cast(torch.Tensor, stop.value)

    def most_likely(self, tree: DraftTree, nodes: Ordered[int], k: int) -> Opinion:
        """The k most likely tokens after each of `nodes`, and their probabilities at temperature 1."""
        return self.best(self.after(tree, nodes), k)

    def best(self, logits: torch.Tensor, k: int) -> Opinion:
        """`most_likely`, of the logits [n, outputs] after the nodes that were asked for last."""
        assert self.root is not None
        ranks = [self.root.best if row < 0 else self.ranks.get(row) for row in self.told]
        known = [each for each in ranks if each is not None and len(each[0]) >= k]
        if len(known) == len(ranks):
            return [ids[:k] for ids, _ in known], [chances[:k] for _, chances in known]
        self.most = max(self.most, k)
        return self.named(*most_likely(logits, k))

    def named(self, places: np.ndarray, chances: np.ndarray) -> Opinion:
        """Outputs of the head [n, k] as tokens, and their probabilities."""
        known = self.head.words
        return (places if known is None else known[places]).tolist(), chances.tolist()

    def rank(self, nodes: Nodes | None, opinion: Opinion) -> None:
        """Note what is most likely after nodes that were read, or after the text where `nodes` is None."""
        best = list(zip(opinion[0], opinion[1], strict=True))
        if nodes is not None:
            self.ranks.update(enumerate(best, start=nodes.mask.shape[1] - len(best)))
        elif self.root is not None:
            self.root = replace(self.root, best=best[0])

    def rank_by_depth(self, nodes: Nodes) -> None:
        """Note what is most likely after nodes that were read, where it is known of their depths."""
        if self.ahead:
            best = [self.ahead[depth] for depth in nodes.depths.tolist()]
            self.ranks.update(enumerate(best, start=nodes.mask.shape[1] - len(best)))


def read_all(readings: Ordered[HeadReading]) -> None:
    """Let a head read what texts have grown by."""
    # Where one of several failed before, those read by then have nothing more to read.
    grown = [each for each in readings if each.fresh]
    for some in [grown] if grown and grown[0].head.joint else [[each] for each in grown]:
        heard = some[0].head.hear_all([(each.memory, each.fresh) for each in some])
        for reading, root in zip(some, heard, strict=True):
            reading.root, reading.fresh, reading.ahead = root, [], []
            reading.rows.clear()
