"""P-EAGLE: an EAGLE-3 head that predicts several tokens in one pass, from one learned state."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.registry import register
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.step.tree_policy import TreePolicy

from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead, Nodes
from ..heads.head import TextItems
from ..heads.layered import HeadRows, lengths_kept
from ..heads.native import NativeHead
from .eagle_3 import EAGLE3Head


class PEAGLEHead(EAGLE3Head):
    """The first row is EAGLE-3's; the rows below it read a mask token and one learned state.

    A row attends to the text and to the rows of the same block above it. So all rows are run at once, and what a row
    predicts does not depend on the tokens that are drafted above it.
    """

    kind = "p-eagle"
    taught = 4

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, settings = super().untrained(model, seed)
        random = torch.Generator().manual_seed(seed)
        width = tensors["fc.weight"].shape[1]
        drawn = torch.randn(width, generator=random, dtype=torch.float32, device="cpu")
        tensors["mask_states.weight"] = drawn.to(tensors["fc.weight"])
        mask = model.config.eos_ids[0] if model.config.eos_ids else 0
        return tensors, settings | {"mask_token": mask, "heads": cls.taught}

    @cached_property
    def native(self) -> NativeHead | None:
        return None

    def read_all(self, texts: Ordered[TextItems]) -> torch.Tensor:
        memories, n, rows = [memory for memory, _, _, _ in texts], self.reach - 1, (self.reach - 1) * len(texts)
        if not n:
            return super().read_all(texts)
        with lengths_kept([memory.layers for memory in memories]):
            first = super().read_all(texts)
            blocks = [HeadRows(each.layers, each.end + 1 + np.arange(n), np.tri(n, dtype=bool)) for each in memories]
            tokens = torch.full((rows,), self.trained.settings["mask_token"], dtype=torch.int64, device="cpu")
            for memory in memories:
                # Before as many others are there.
                memory.below = None
            _, below = self._passed(blocks, self._masked()[0].expand(rows, -1), tokens, np.arange(rows))
        for memory, logits in zip(memories, below.split(n), strict=True):
            memory.cut(0)
            memory.below = logits
        return first

    def grow_all(self, nodes: Ordered[Nodes]) -> list[torch.Tensor]:
        return [each.memory.below[to_device(each.depths - 1, each.memory.below.device)] for each in nodes]

    @property
    def by_depth(self) -> bool:
        return True

    def chained(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        masked, token = self._masked()
        return masked.expand_as(features), token.expand_as(embedded)

    def unrolled(self, along: float) -> int:
        return self.taught

    def _masked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The feature and the embedding of a row whose token is not known: [1, hidden] each."""
        states = self.parts["mask_states.weight"].chunk(len(self.taps))
        features = self.enter({tap: state[None] for tap, state in zip(self.taps, states, strict=True)})
        mask = torch.tensor([self.trained.settings["mask_token"]], dtype=torch.int64, device="cpu")
        return features, self.embed(mask)


@register(
    "p-eagle",
    paper="P-EAGLE: Parallel-Drafting EAGLE with Scalable Training (2026)",
    lossless=True,
    requirements=("hidden states of every token", "a head made by decodery train head --kind p-eagle"),
)
@dataclass(frozen=True)
class PEAGLE(HeadDrafter):
    """Drafts several tokens in one pass of an EAGLE-3 head with mask tokens.

    Rows answer for their own depth, whatever is drafted above them. Scope: the request; memory: keys and values of the
    head's layers.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head`, a folder or Hub id as vLLM's `speculators` and SpecForge
            publish them or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = PEAGLEHead

    length: int = field(default=8, kw_only=True)
    tree_policy: TreePolicy | str | None = field(default=None, kw_only=True)

    def held_rows(self, nodes: int) -> int:
        # And of a text what its head expects at all further depths.
        below = 0 if self.trained is None else self.trained.settings["heads"] - 1
        return super().held_rows(nodes) + below
