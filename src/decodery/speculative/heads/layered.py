"""Heads made of decoder layers with keys and values of their own, whose passes can run at fixed shapes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .fixed_shapes import HeadPasses
from .grown import DraftHead
from .parts import DecoderLayer, Held

Attention = Callable[[int, torch.Tensor], torch.Tensor]
"""A layer's number and what its attention reads [n, width] -> what that adds to the stream [n, hidden]."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of one text in a pass.

    Attributes:
        held: By layer, its keys and values.
        mask: [n, tentative rows + n], of a tree; None: the rows are text, in order.
        fresh: Rows of text that the same pass writes before these.
    """

    held: Ordered[Held]
    positions: np.ndarray
    mask: np.ndarray | torch.Tensor | None = None
    fresh: int = 0

    def visible(self, layer: DecoderLayer, before: int) -> tuple[np.ndarray, np.ndarray | torch.Tensor]:
        """See `DecoderLayer.visible`."""
        return layer.visible(len(self.positions), before, self.mask)

    def reserve(self) -> None:
        """Make room in all layers."""
        for own in self.held:
            own.reserve(len(self.positions), text=self.mask is None)

    def wrote(self) -> None:
        """The rows lie where there was room for them."""
        for own in self.held:
            own.wrote(len(self.positions), text=self.mask is None)


@contextmanager
def lengths_kept(texts: Ordered[Ordered[Held]]) -> Iterator[None]:
    """Leave texts as long as they were where a pass over them fails: each is served alone then.

    Args:
        texts: Of each, keys and values by layer.
    """
    held = [each for layers in texts for each in layers]
    lengths = [each.length for each in held]
    try:
        yield
    except Exception:
        for each, length in zip(held, lengths, strict=True):
            each.length = length
        raise


class LayeredHead(DraftHead):
    """A head whose pass over rows of several texts goes from one layer to the next."""

    @property
    @abstractmethod
    def stack(self) -> Ordered[DecoderLayer]:
        """Its layers, the first one first."""

    @abstractmethod
    def through(
        self, features: torch.Tensor, tokens: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows from their inputs to what leaves the head.

        Args:
            features: [n, width] that they read.
            tokens: [n] likewise.
            attention: Of each layer.

        Returns:
            The features after all rows [n, hidden], and what `project` takes.
        """

    @cached_property
    def fixed(self) -> HeadPasses | None:
        """What runs passes over few rows as graphs; None off CUDA, and where experts or latents are read."""
        plain = self.model.device.type == "cuda" and not {"experts", "latent"} & self.trained.settings.keys()
        return HeadPasses() if plain else None

    @property
    def passes(self) -> HeadPasses | None:
        """`fixed` where no gradients are wanted."""
        return None if torch.is_grad_enabled() else self.fixed
