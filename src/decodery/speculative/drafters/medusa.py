"""Medusa: several heads on the last hidden state guess one token each, so many places ahead."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.step.tree_policy import TreePolicy

from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import Guess, TrainedHead


@dataclass(slots=True)
class _Memory:
    """logits: [heads, outputs], what each head expects after the text's last known state."""

    logits: torch.Tensor | None = None


class MedusaHead(DraftHead):
    """Head k is one or more residual blocks over the target's last state, independent of other guesses.

    Untrained, every block adds nothing, and every head says what the target itself says next.
    """

    kind = "medusa"

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self._blocks: int = trained.settings["blocks"]
        self.fits(trained.tensors["head.0.0.weight"].shape[1])

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (-1,)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        hidden, tensors = model.config.hidden_size, dict[str, torch.Tensor]()
        for number in range(cls.taught):
            tensors[f"head.{number}.0.weight"] = torch.zeros(hidden, hidden, dtype=torch.float32, device="cpu")
            tensors[f"head.{number}.0.bias"] = torch.zeros(hidden, dtype=torch.float32, device="cpu")
        return tensors, {"heads": cls.taught, "blocks": 1}

    def begin(self) -> _Memory:
        return _Memory()

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        last = self.model.final_norm(states[-1][-1:])
        spoken = [self._spoken(last, number) for number in range(self.reach)]
        if "lm_head.0.weight" in self.parts:
            memory.logits = torch.cat([self.project(each, number) for number, each in enumerate(spoken)])
        else:
            # All heads at once: the vocabulary projection is read once, not once for every level of a tree.
            memory.logits = self.project(torch.cat(spoken))
        return memory.logits[0]

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        assert memory.logits is not None
        return memory.logits[to_device(depths, memory.logits.device)]

    @property
    def by_depth(self) -> bool:
        return True

    def computed(self, memory: _Memory) -> bool:
        return memory.logits is not None

    def ahead(self, memories: Ordered[_Memory]) -> list[torch.Tensor] | None:
        return [each.logits for each in memories if each.logits is not None]

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        shape, last = states[-1].shape, self.model.final_norm(states[-1].flatten(0, 1))
        spoken = (self._spoken(last, step) for step in range(steps))
        return [Guess(each.view(shape), last.view(shape)) for each in spoken]

    def _spoken(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """What head `number` makes of states [n, hidden] -> [n, hidden]."""
        for block in range(self._blocks):
            rows = self.parts.block(f"head.{number}.{block}", rows)
        return rows


@register(
    "medusa",
    paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind medusa",),
)
@dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Drafts by heads over the target's last hidden state, each of which guesses one place further ahead.

    What stands at a node depends on its depth and rank alone, so one call of the heads serves a whole tree. As
    published with one residual block per head, but all share the target's vocabulary projection where they bring none.
    Scope: the request; memory: the heads' logits.

    Attributes:
        tree_policy: How the tree is grown, by default the places that were right most often on held-out texts, a
            chain of `length` where it is None.
        head: A file or folder made by `decodery train head`, a folder or Hub id as its authors or vLLM publish them or
            a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = MedusaHead

    tree_policy: TreePolicy | str | None = field(default="fixed-tree", kw_only=True)
