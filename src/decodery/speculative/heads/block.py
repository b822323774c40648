"""What a head that fills in blocks remembers of a text, and the rows of a block in a pass."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .layered import HeadRows
from .parts import DecoderLayer, Held


@dataclass(slots=True)
class BlockMemory:
    """What a block head has read of a text.

    Attributes:
        held: Of every layer keys and values of the text's context features.
        positions: [length], of these features.
        guessed: [tokens, hidden], what the rows of the last block predict from.
        opened: [1, hidden], the block's first row.
        logits: [tokens, outputs] of them, None while they are not needed.
        states: [1 + rows, rank], what a recurrent head remembers after the root and after every node.
    """

    held: list[Held]
    positions: np.ndarray
    guessed: torch.Tensor
    opened: torch.Tensor
    logits: torch.Tensor | None = None
    states: torch.Tensor | None = None

    def cut(self, length: int) -> None:
        """Forget the text but its first `length` tokens."""
        self.positions = self.positions[:length]
        for held in self.held:
            held.length, held.rows = min(held.length, length), 0

    def __deepcopy__(self, memo: dict[int, object]) -> BlockMemory:
        # Tensors other than keys and values are never written to; nodes do not follow a fork.
        states = None if self.states is None else self.states[:1]
        return replace(self, held=deepcopy(self.held, memo), states=states)


@dataclass(frozen=True)
class BlockWindows:
    """What the rows of a block attend to in sliding layers.

    Attributes:
        size: Rows of a block.
        from_anchor: Whether all of them count from the first.
        bidirectional: Whether a row sees those after it.
    """

    size: int
    from_anchor: bool
    bidirectional: bool

    def near(self, window: int, positions: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the text's positions [n] as [block, n], and [block, block], where blocks begin at `start`."""
        offsets = torch.arange(self.size, device="cpu")
        if self.from_anchor:
            near = (positions >= start - window)[None].expand(self.size, -1)
        else:
            near = positions[None] > start + offsets[:, None] - window
        own = torch.ones(self.size, self.size, dtype=torch.bool, device="cpu")
        return near, own if self.bidirectional else own.tril()


@dataclass(frozen=True, slots=True)
class BlockRows(HeadRows):
    """The rows of a block after a text, which nothing keeps.

    Attributes:
        text: [length] positions of the text, those that the same pass reads included.
        windows: Of sliding layers.
    """

    text: np.ndarray = field(kw_only=True)
    windows: BlockWindows = field(kw_only=True)

    def visible(self, layer: DecoderLayer, before: int) -> tuple[np.ndarray, np.ndarray]:
        if layer.shape.sliding is None:
            n = len(self.positions)
            return np.zeros(n, dtype=np.int64), np.ones((n, n), dtype=bool)
        near, own = self.windows.near(layer.shape.sliding, torch.from_numpy(self.text), int(self.positions[0]))
        # Positions of a text ascend: what a window hides lies first.
        return before - near.sum(dim=1).numpy(), own.numpy()

    def reserve(self) -> None:
        for own in self.held:
            own.reserve(self.fresh + len(self.positions), text=True)

    def wrote(self) -> None:
        pass
