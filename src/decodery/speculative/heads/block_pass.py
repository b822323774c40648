"""One pass of a block head over all texts that wait for a draft."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from decodery.core.threads import one_thread
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.step.sequence import Sequence

from .drafter import HeadDrafter
from .head import DraftHead, Heard, Seen
from .reading import HeadReading

if TYPE_CHECKING:
    from ..drafters.dflash import DFlashHead

_passes: WeakKeyDictionary[DraftHead, BlockPass] = WeakKeyDictionary()
"""By head: what runs it over several texts."""


@dataclass(eq=False)
class BlockPass:
    """A block head as the engine's batches see a model: its segments are blocks of texts.

    Attributes:
        head: The head.
        waiting: The reading whose block a segment is, by the segment's identity.
    """

    head: DFlashHead
    waiting: dict[int, HeadReading] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.head.model.device

    def read(self, reading: HeadReading, position: int) -> ForwardCoroutine[None]:
        """Let a head read what a text has grown by, and predict the block after it.

        Args:
            reading: What the head has read of the text.
            position: Where the block begins.
        """
        size = self.head.block
        segment = Segment(position + np.arange(size), tokens=np.zeros(size, dtype=np.int64), logit_rows=[0])
        self.waiting[id(segment)] = reading
        try:
            yield [ForwardRequest(cast(LanguageModel, self), segment, role="draft")]
        finally:
            self.waiting.pop(id(segment), None)

    def forward(self, batch: Batch, *, taps: Ordered[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel`: one pass over the blocks of all segments."""
        readings = [self.waiting[id(segment)] for segment in batch.segments]
        with torch.no_grad(), one_thread():
            lengths = [len(reading.memory.positions) for reading in readings]
            try:
                texts = [(reading.memory, *_items(reading.fresh, self.head.dtype)) for reading in readings]
                logits = self.head.read_all(texts)
            except Exception:
                # Each is served alone then.
                for reading, length in zip(readings, lengths, strict=True):
                    reading.memory.cut(length)
                raise
        for reading, row in zip(readings, logits, strict=True):
            reading.root = Heard(row)
            reading.fresh = []
            reading.rows.clear()
        return Scores(logits, list(range(len(readings) + 1)))


def _items(seen: list[Seen], dtype: torch.dtype) -> tuple[dict[Tap, torch.Tensor], torch.Tensor, np.ndarray]:
    """The states, the tokens after them and the positions of what was seen of a text, in order."""
    tokens = [token for each in seen for token in each.tokens]
    positions = np.concatenate([np.arange(each.start, each.start + len(each.tokens)) for each in seen])
    states = {tap: torch.cat([each.states(tap) for each in seen]).to(dtype) for tap in seen[0].hidden}
    return states, torch.tensor(tokens, dtype=torch.int64, device="cpu"), positions


@dataclass(frozen=True)
class BlockDrafter(HeadDrafter):
    """A drafter whose head predicts a block in one pass, which texts that wait at the same time share."""

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        reading: HeadReading = seq.states[self]
        if reading.fresh and min(budget.nodes, budget.depth) > 0:
            head: Any = reading.head
            yield from _passes.setdefault(head, BlockPass(head)).read(reading, len(seq.tokens) - 1)
        return (yield from super().propose(seq, budget))
