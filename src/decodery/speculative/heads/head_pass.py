"""One pass of a head over all texts that wait for it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import cast
from weakref import WeakSet

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
from decodery.step.level_choice import choose_next
from decodery.step.look_ahead import Ahead, Look
from decodery.step.sequence import Sequence
from decodery.step.wanted import Wanted, row_choices_of, up_to_end

from .grown import DraftHead, Nodes
from .reading import HeadReading, read_all

Rows = tuple[HeadReading, Nodes | None, Wanted | Look | None]
"""Of one text in a pass."""
ROLE = "draft"
"""What rows of a head go by in ledgers."""
_PASS = "_shared_pass"
"""Where a head keeps what runs it over several texts."""


@dataclass(eq=False)
class HeadPass:
    """A head as a batch sees a model: a segment is what a text has grown by, or nodes of its draft.

    Attributes:
        head: The head.
        texts: Those that draft with it. One alone needs no engine to run the head.
        waiting: The reading whose rows a segment is, the nodes where it is no text, and what is wanted of its rows, by
            the segment's identity.
    """

    head: DraftHead
    texts: WeakSet[HeadReading] = field(default_factory=WeakSet)
    waiting: dict[int, Rows] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.head.model.device

    def forward(self, batch: Batch, *, taps: Ordered[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel`: one pass over the texts and one over the nodes of all segments."""
        items = [self.waiting[id(segment)] for segment in batch.segments]
        read_all([reading for reading, nodes, _ in items if nodes is None])
        given = [nodes for _, nodes, _ in items if nodes is not None]
        if any(nodes.tokens.device.type != "cpu" for nodes in given):
            given = [nodes._replace(tokens=nodes.tokens.to(self.device, non_blocking=True)) for nodes in given]
        grown = iter(self.head.grown(given))
        found = [self.root(reading) if nodes is None else next(grown) for reading, nodes, _ in items]
        logits, bounds = torch.cat(found), np.cumsum([0, *map(len, found)]).tolist()
        self._answer(items, logits, bounds)
        return Scores(logits, bounds)

    def _answer(self, items: Ordered[Rows], logits: torch.Tensor, bounds: list[int]) -> None:
        """Let readings know what there is to know of their rows, whose logits are [n, outputs]."""
        self._choose(items, logits, bounds)
        self._rank(items, logits, bounds)
        with torch.no_grad(), one_thread():
            choose_next(
                [
                    (wanted, logits[first:last] if wanted.processors is None else self.head.spread(logits[first:last]))
                    for (_, _, wanted), first, last in zip(items, bounds, bounds[1:], strict=False)
                    if isinstance(wanted, Look)
                ]
            )

    def _choose(self, items: Ordered[Rows], logits: torch.Tensor, bounds: list[int]) -> None:
        """Let readings on a device know what of their rows is wanted."""
        wanted = [each if isinstance(each, Wanted) else None for _, _, each in items]
        if all(each is None for each in wanted):
            return
        with torch.no_grad(), one_thread():
            found = row_choices_of(self.head.spread(logits), bounds, wanted)
        for (reading, _, _), choices in zip(items, found, strict=True):
            reading.choices = choices

    def _rank(self, items: Ordered[Rows], logits: torch.Tensor, bounds: Ordered[int]) -> None:
        """Let readings on a device know what is most likely, by one copy for all of them."""
        most = max([reading.most for reading, _, wanted in items if wanted is None], default=0)
        if not most or logits.device.type == "cpu":
            return
        read = [reading for reading, nodes, _ in items if nodes is None]
        with torch.no_grad(), one_thread():
            ahead = (self.head.ahead([reading.memory for reading in read]) if read else None) or []
            places, chances = most_likely(torch.cat([logits, *ahead]), most)
        for (reading, nodes, _), first, last in zip(items, bounds, bounds[1:], strict=False):
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

    def drawn(self, reading: HeadReading, wanted: Ordered[Wanted]) -> ForwardCoroutine[list[int]]:
        """The tokens that follow a text, each chosen after those before it, by one copy of all.

        Args:
            reading: Of the text.
            wanted: Of each token in turn, see `Wanted.chain`.

        Returns:
            One for each, -1 where the largest logit is no finite number, and of what follows that nothing is known.
        """
        self.texts.add(reading)
        if reading.fresh:
            yield from self._scored(reading, None, wanted[0])
        else:
            self._answer([(reading, None, wanted[0])], self.root(reading), [0, 1])
        reading.rows.clear()
        count, before = len(wanted), list[torch.Tensor]()
        alone = [range(node, node + 1) for node in range(1, count)]
        for nodes in [range(1, count)] if self.head.by_depth and alone else alone:
            assert reading.choices is not None and reading.choices.there is not None
            before.append(reading.choices.there)
            rows, final = np.array(nodes), nodes.stop == count
            # Where nodes are read together, nothing depends on their tokens.
            tokens = before[-1].clamp(min=0).expand(len(rows))
            mask = np.tri(len(rows), nodes.stop - 1, nodes.start - 1, dtype=bool)
            keys = np.concatenate([wanted[node].keys for node in nodes])
            own = replace(wanted[-1], keys=keys, stay=not final, before=tuple(before) if final else ())
            yield from self._scored(reading, Nodes(reading.memory, tokens, rows - 2, rows, mask), own)
        assert reading.choices is not None
        return reading.choices.picks

    def ahead(self, reading: HeadReading, look: Look) -> ForwardCoroutine[Ahead]:
        """What follows a text and the nodes below it that are chosen on the device, by one copy of all levels."""
        self.texts.add(reading)
        if reading.fresh:
            yield from self._scored(reading, None, look)
        else:
            self._answer([(reading, None, look)], self.root(reading), [0, 1])
        logits, before = list[torch.Tensor](), -1
        while not look.last:
            rows = look.rows
            assert rows is not None
            depths = np.full(len(rows.tokens), len(look.levels))
            # The text's end is no row.
            nodes = Nodes(reading.memory, rows.tokens, rows.above + before, depths, rows.seen)
            found = yield from self._scored(reading, nodes, look)
            assert found is not None
            before += len(logits[-1]) if logits else 1
            logits.append(found)
        reading.ranks.clear()
        reading.rows.hold(ahead := look.ahead(), logits)
        return ahead

    def _scored(
        self, reading: HeadReading, nodes: Nodes | None, wanted: Wanted | Look | None = None
    ) -> ForwardCoroutine[torch.Tensor | None]:
        rows = reading.unread if nodes is None else len(nodes.tokens)
        if len(self.texts) < 2:
            charged().spend(ROLE, rows, 0.0, first=True)
            found = reading.answer(nodes)
            logits = self.root(reading) if found is None else found
            self._answer([(reading, nodes, wanted)], logits, [0, len(logits)])
            return found
        segment = Segment(np.zeros(rows, dtype=np.int64), tokens=np.zeros(rows, dtype=np.int64))
        self.waiting[id(segment)] = reading, nodes, wanted
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


def drawn(reading: HeadReading, seq: Sequence, length: int) -> ForwardCoroutine[list[int]]:
    """The tokens of a chain that passes of a head can draw on its device, see `TreeDrafter.drawn`."""
    if reading.head.model.device.type == "cpu":
        return []
    wanted = Wanted.chain(seq, length)
    return up_to_end(seq, (yield from _pass_of(reading.head).drawn(reading, wanted))) if wanted else []


def ahead(reading: HeadReading, look: Look) -> ForwardCoroutine[Ahead | None]:
    """See `TreeDrafter.read_ahead`."""
    head = reading.head
    words = head.model.vocab_size if head.vocabulary is None else len(head.vocabulary)
    if not head.looks_ahead or max(level.children for level in look.plan) > words:
        return None
    if look.processors is None:
        look.words = head.vocabulary
    return (yield from _pass_of(head).ahead(reading, look))


def after(reading: HeadReading, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
    """The logits [k, outputs] after `nodes` of a tree below the end of a text."""
    return (yield from _pass_of(reading.head).after(reading, tree, nodes))


def _pass_of(head: DraftHead) -> HeadPass:
    kept: dict[str, HeadPass] = vars(head)
    return kept.get(_PASS) or kept.setdefault(_PASS, HeadPass(head))
