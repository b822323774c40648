"""Heads that draft a tree node by node, of the states and words of the text and of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Ordered
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch

from decodery.core.threads import one_thread
from decodery.models.hooks import Tap

from .head import BoundHead, Heard, Seen, TextItems


class Nodes(NamedTuple):
    """Nodes of one level of a text's draft; see `DraftHead.grow`.

    Where a head looks ahead, rows above and masks may be on its device.
    """

    memory: Any
    tokens: torch.Tensor
    above: np.ndarray | torch.Tensor
    depths: np.ndarray
    mask: np.ndarray | torch.Tensor


class DraftHead(BoundHead):
    """A head that reads a text and drafts on below it by itself.

    What it remembers of a text is a memory of its own making, which can be deep-copied. Items of a text pair the
    target's states after a token with the token that follows it; nodes of a draft tree are tentative rows.

    Attributes:
        joint: Whether `read_all` and `grow_all` take one pass for all texts; elsewhere each takes its own, one after
            another, and the host waits for all of them once.
    """

    joint: ClassVar[bool] = False

    @property
    def looks_ahead(self) -> bool:
        """Whether it reads nodes that are chosen on its device, level by level."""
        return not self.by_depth

    @abstractmethod
    def begin(self) -> Any:
        """The memory of a text nothing is known of."""

    def hear(self, memory: Any, seen: list[Seen]) -> Heard:
        """`read` all of what was seen of a text, in order."""
        return self.hear_all([(memory, seen)])[0]

    def hear_all(self, texts: Ordered[tuple[Any, list[Seen]]]) -> list[Heard]:
        """`hear` of several texts: memories, and what was seen after what they hold."""
        with torch.no_grad(), one_thread():
            return [
                Heard(row) for row in self.read_all([(memory, *_items(seen, self.dtype)) for memory, seen in texts])
            ]

    def read_all(self, texts: Ordered[TextItems]) -> torch.Tensor:
        """`read` of several texts, in one pass where the head is `joint`: [texts, outputs]."""
        home = self.model.device
        return torch.stack([self.read(own, states, _brought(tokens, home), at) for own, states, tokens, at in texts])

    def grown(self, nodes: Ordered[Nodes]) -> list[torch.Tensor]:
        """`grow` of several texts without gradients."""
        with torch.no_grad(), one_thread():
            return self.grow_all(nodes) if nodes else []

    def grow_all(self, nodes: Ordered[Nodes]) -> list[torch.Tensor]:
        """`grow` of several texts, in one pass where the head is `joint`."""
        home = self.model.device
        return [
            self.grow(own, _brought(tokens, home), cast(np.ndarray, above), depths, cast(np.ndarray, mask))
            for own, tokens, above, depths, mask in nodes
        ]

    def computed(self, memory: Any) -> bool:
        """Whether what follows every node of a draft is known already, so that `grow` takes no pass."""
        return False

    @property
    def by_depth(self) -> bool:
        """Whether what follows a node depends on its depth alone."""
        return False

    def ahead(self, memories: Ordered[Any]) -> list[torch.Tensor] | None:
        """By depth, what follows the nodes of drafts of texts just read: logits [depths, outputs] of each.

        None where that depends on the nodes.
        """
        return None

    @abstractmethod
    def read(
        self, memory: Any, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        """Read items of the text.

        States are {tap: [n, width]}, with the tokens [n] that follow and the positions [n] of the states. Nodes are
        forgotten.

        Returns:
            The logits [outputs] of what follows the last token.
        """

    @abstractmethod
    def grow(
        self, memory: Any, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        """Read nodes of one level.

        Args:
            mask: [n, rows + n] bool, which rows each sees; nodes after the first `rows` are forgotten.

        Returns:
            The logits [n, outputs] of what follows each.
        """


def _brought(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tokens.to(device, non_blocking=True)


def _items(seen: list[Seen], dtype: torch.dtype) -> tuple[dict[Tap, torch.Tensor], torch.Tensor, np.ndarray]:
    """The states, the tokens after them and the positions of what was seen of a text, in order."""
    tokens = [token for each in seen for token in each.tokens]
    positions = np.concatenate([np.arange(each.start, each.start + len(each.tokens)) for each in seen])
    states = {tap: torch.cat([each.states(tap) for each in seen]).to(dtype) for tap in seen[0].hidden}
    return states, torch.tensor(tokens, dtype=torch.int64, device="cpu"), positions
