"""What drafters share that draft with some of the target's own layers, on a fork of its cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from decodery.core.requirements import Requirements
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel, Reader
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from .rows import TreeRows


@dataclass(slots=True)
class OwnReading:
    """What some layers have read beyond a text's cache.

    Keys and values of the text are those of the whole model; of the draft, those of the layers that were run.

    Attributes:
        model: Whose layers, None for the text's own model; another one has to keep keys and values of the same shape.
        cache: A fork of it.
        length: Of the text it was forked at.
    """

    model: Reader | None = None
    cache: KVCache | None = None
    length: int = 0
    rows: TreeRows = field(default_factory=TreeRows)

    def after(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], layer_plan: LayerPlan
    ) -> ForwardCoroutine[torch.Tensor]:
        """Logits [k, vocab] after `nodes` of a tree, by the layers of `route`."""
        if self.cache is None or self.length != len(seq.tokens):
            self.forget()
            self.cache, self.length = seq.cache.fork(), len(seq.tokens)
        missing = seq.tokens[self.cache.next_position : -1]
        if missing:
            # Tokens that are sure to become text and that the target has not read yet.
            yield from through(seq, Segment.chunk(missing, self.cache, logit_rows=[]), layer_plan, model=self.model)
            self.cache.keep(range(len(missing)))
        read = partial(through, seq, layer_plan=layer_plan, model=self.model)
        return (yield from self.rows.after(self.cache, tree, nodes, read))

    def __deepcopy__(self, memo: dict[int, object]) -> OwnReading:
        return OwnReading(self.model)

    def forget(self) -> None:
        """Give the fork's memory back."""
        self.cache = None
        self.rows.clear()


def through(
    seq: Sequence, segment: Segment, layer_plan: LayerPlan, role: str = "draft", model: Reader | None = None
) -> ForwardCoroutine[torch.Tensor]:
    """The logits of a segment's rows after a route through a model, the text's own where none is named."""
    (scored,) = yield [
        ForwardRequest(
            cast(LanguageModel, seq.request.model if model is None else model),
            segment,
            role=role,
            layer_plan=layer_plan,
        )
    ]
    return scored.logits


@dataclass(frozen=True)
class OwnLayers(TreeDrafter):
    """A drafter that is a part of the target. Its memory is, or has as `reading`, an `OwnReading`."""

    @property
    def requirements(self) -> Requirements:
        grows = isinstance(self.tree_policy, TreePolicy)
        return Requirements.merged((super().requirements, Requirements(layer_plans=True, keys=True, trees=grows)))

    @abstractmethod
    def layer_plan(self, seq: Sequence) -> LayerPlan:
        """Which layers and sublayers draft now."""

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        reading: OwnReading = seq.states[self].reading
        return (yield from reading.after(seq, tree, nodes, self.layer_plan(seq)))

    def forget(self, seq: Sequence) -> None:
        seq.states[self].reading.forget()
