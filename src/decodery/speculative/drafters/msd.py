"""MSD: a drafter of states for prompts that hold images, whose patches it reads as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.step.tree_policy import TreePolicy

from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import EMBEDDED
from .eagle import EAGLEHead


def decoupled(stream: torch.Tensor, behind: torch.Tensor | None) -> torch.Tensor:
    """What the layer reads of each item, [n, hidden]: what stands after it where that is an embedding.

    Args:
        stream: Of items as EAGLE makes them, from a state and the token after it.
        behind: See `heads.head.EMBEDDED`, None for a text of tokens alone.
    """
    return stream if behind is None else torch.where(behind[:, :1] > 0, behind[:, 1:].to(stream), stream)


class MSDHead(EAGLEHead):
    """EAGLE's layer; where a position holds an embedding it reads that alone, without state and `fc`.

    An item is what its token or embedding stands after, as everywhere in EAGLE: the state of the last word before an
    image goes with nothing, that of the image's last row with the word after it. (The published code puts that word
    into the first item of the image as well, and then overwrites the item.)
    """

    kind = "msd"
    sees_embeddings = True

    def beside(
        self, stream: torch.Tensor, attended: torch.Tensor, states: dict[Tap, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = decoupled(stream, states.get(EMBEDDED))
        return found, found


@register(
    "msd",
    paper="Speculative Decoding Reimagined for Multimodal Large Language Models (2025)",
    lossless=True,
    requirements=("a head made by decodery train head --kind msd --images PROMPTS",),
)
@dataclass(frozen=True)
class MSD(HeadDrafter):
    """Drafts as EAGLE does after prompts with images, of which it reads embeddings alone.

    Of words the layer reads the state before each beside its embedding; an image's rows say nothing about words to
    come, and go in as the vision tower made them. The layer learns from plain texts first, then from more and more that
    hold images. On a prompt of tokens alone it is EAGLE. Scope: the request; memory: keys and values of one layer.

    Attributes:
        tree_policy: How the tree is grown.
        head: A file or folder made by `decodery train head`, or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = MSDHead

    tree_policy: TreePolicy | str | None = field(default="eagle-2(nodes=63,width=8,depth=5)", kw_only=True)
