"""P-EAGLE: an EAGLE-3 head that predicts several tokens in one pass, from one learned state."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.torch.transformer import Transformer
from decodery.step.tree_policy import TreePolicy

from ..heads.drafter import HeadDrafter
from ..heads.head import DraftHead
from ..heads.native import NativeHead
from ..heads.recurrent import RecurrentMemory
from .eagle_3 import EAGLE3Head

_DEPTHS = 8


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
        return tensors, settings | {"mask_token": mask, "heads": _DEPTHS}

    @cached_property
    def native(self) -> NativeHead | None:
        return None

    def read(
        self, memory: RecurrentMemory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        first = super().read(memory, states, tokens, positions)
        n = self.reach - 1
        features, embedded = self._masked()
        stream, attended = self.inputs(features.expand(n, -1), embedded.expand(n, -1))
        found = self.attended(memory, stream, attended, memory.end + 1 + np.arange(n), np.tri(n, dtype=bool))
        memory.cut(0)
        memory.below = self.leave(found)[1]
        return first

    def grow(
        self,
        memory: RecurrentMemory,
        tokens: torch.Tensor,
        above: np.ndarray,
        depths: np.ndarray,
        mask: np.ndarray,
    ) -> torch.Tensor:
        assert memory.below is not None
        # Nodes of one depth get one prediction.
        found, which = np.unique(depths, return_inverse=True)
        return self.project(memory.below[torch.from_numpy(found - 1)])[torch.from_numpy(which)]

    def chained(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        masked, token = self._masked()
        return masked.expand_as(features), token.expand_as(embedded)

    def unrolled(self, along: float) -> int:
        return self.taught

    def _masked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The feature and the embedding of a row whose token is not known: [1, hidden] each."""
        states = self.parts["mask_states.weight"].chunk(len(self.taps))
        features = self.enter({tap: state[None] for tap, state in zip(self.taps, states, strict=True)})
        return features, self.embed(
            torch.tensor([self.trained.settings["mask_token"]], dtype=torch.int64, device=self.model.device)
        )


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
