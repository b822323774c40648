"""One pass of a head over all texts that wait for it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from decodery.core.ledger import charged
from decodery.core.threads import one_thread
from decodery.core.topk import most_likely
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest

from .grown import DraftHead, Nodes
from .reading import HeadReading, read_all

ROLE = "draft"
"""What rows of a head go by in ledgers."""
_passes: WeakKeyDictionary[DraftHead, HeadPass] = WeakKeyDictionary()
"""By head: what runs it over several texts."""


@dataclass(eq=False)
class HeadPass:
    """A head as a batch sees a model: a segment is what a text has grown by, or nodes of its draft.

    Attributes:
        head: The head.
        texts: Those that draft with it. One alone needs no engine to run the head.
        waiting: The reading whose rows a segment is, and the nodes where it is no text, by the segment's identity.
    """

    head: DraftHead
    texts: WeakSet[HeadReading] = field(default_factory=WeakSet)
    waiting: dict[int, tuple[HeadReading, Nodes | None]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.head.model.device

    def forward(self, batch: Batch, *, taps: Ordered[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel`: one pass over the texts and one over the nodes of all segments."""
        items = [self.waiting[id(segment)] for segment in batch.segments]
        read_all([reading for reading, nodes in items if nodes is None])
        grown = iter(self.head.grown([nodes for _, nodes in items if nodes is not None]))
        found = [self.root(reading) if nodes is None else next(grown) for reading, nodes in items]
        logits, bounds = torch.cat(found), np.cumsum([0, *map(len, found)]).tolist()
        self._rank(items, logits, bounds)
        return Scores(logits, bounds)

    def _rank(
        self, items: Ordered[tuple[HeadReading, Nodes | None]], logits: torch.Tensor, bounds: Ordered[int]
    ) -> None:
        """Let readings on a device know what is most likely, by one copy for all of them."""
        most = max([reading.most for reading, _ in items])
        if not most or logits.device.type == "cpu":
            return
        read = [reading for reading, nodes in items if nodes is None]
        with torch.no_grad(), one_thread():
            ahead = (self.head.ahead([reading.memory for reading in read]) if read else None) or []
            places, chances = most_likely(torch.cat([logits, *ahead]), most)
        for (reading, nodes), first, last in zip(items, bounds, bounds[1:], strict=False):
            reading.rank(nodes, reading.named(places[first:last], chances[first:last]))
        first = len(logits)
        for reading, rows in zip(read, ahead, strict=False):
            last = first + len(rows)
            reading.ahead = list(zip(*reading.named(places[first:last], chances[first:last]), strict=True))
            first = last

    def after(self, reading: HeadReading, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        """`HeadReading.after`, in passes that texts share where they wait at the same time."""
        self.texts.add(reading)
        steps, found = reading.steps(tree, nodes), None
        try:
            while True:
                wanted = steps.send(found)
                if wanted is not None and self.head.computed(wanted.memory):
                    found = reading.answer(wanted)
                    reading.rank_by_depth(wanted)
                else:
                    found = yield from self._scored(reading, wanted)
        except StopIteration as stop:
            return cast(torch.Tensor, stop.value)

    def _scored(self, reading: HeadReading, nodes: Nodes | None) -> ForwardCoroutine[torch.Tensor | None]:
        rows = reading.unread if nodes is None else len(nodes.tokens)
        if len(self.texts) < 2:
            charged().spend(ROLE, rows, 0.0, first=True)
            found = reading.answer(nodes)
            logits = self.root(reading) if found is None else found
            self._rank([(reading, nodes)], logits, [0, len(logits)])
            return found
        segment = Segment(np.zeros(rows, dtype=np.int64), tokens=np.zeros(rows, dtype=np.int64))
        self.waiting[id(segment)] = reading, nodes
        try:
            (scored,) = yield [ForwardRequest(cast(LanguageModel, self), segment, role=ROLE)]
        finally:
            self.waiting.pop(id(segment), None)
        return scored.logits

    @staticmethod
    def root(reading: HeadReading) -> torch.Tensor:
        """Logits [1, outputs] after the text."""
        assert reading.root is not None
        return reading.root.logits[None]


def after(reading: HeadReading, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
    """The logits [k, outputs] after `nodes` of a tree below the end of a text."""
    if not reading.head.joint:
        return reading.after(tree, nodes)
    shared = _passes.get(reading.head) or _passes.setdefault(reading.head, HeadPass(reading.head))
    return (yield from shared.after(reading, tree, nodes))
