"""Hidden transfer: states of tokens not written yet are made from those of written ones, between two layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.trained.transfer import Transfer
from decodery.step.draft_tree import Change, DraftTree

from .in_pass import Asked, InPass


@register(
    "hidden-transfer",
    paper="Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration (2024)",
    lossless=True,
    slower=True,
    requirements=("a trained hidden transfer",),
)
@dataclass(frozen=True)
class HiddenTransfer(InPass):
    """Predicts states of further tokens between two layers, and drafts the tokens they give.

    The rest of the layers sees the states made as tokens at the places they stand for. Those after the last token
    accepted make the next draft, of which the nodes are the most likely places by how often guesses of each rank and
    depth were right. Published are states after all nodes; here nodes that are rarely the last one accepted have fewer,
    as many as the rows allow (`shapes.stages`). Rows of such states go through the layers below, too, where no row
    attends to them: they cost as much as others. Scope: the request; memory: the guesses.

    Attributes:
        transfer: A `Transfer`, or the file or folder of the one that `decodery train hidden-transfer` made; None: the
            one that comes with this package for the embedded model.
        length: Rows of a pass at most, of which the last token and the states after it are some; None: as many as make
            this machine fastest by what passes of the model take on it, which may be one.
    """

    transfer: Transfer | str | None = None

    @property
    def requirements(self) -> Requirements:
        return Requirements(trees=True, states=True, changes=True, costs=self.length is None)

    def asked(self, model: Reader) -> Asked:
        found = Transfer.load_or_shipped(
            self.transfer, model, file=Transfer.FILE, setting="hidden-transfer:transfer", command="hidden-transfer"
        )
        found.check(model)
        maps, changes = found.maps.to(model.device), dict[Tap, Change]()
        for layer in dict.fromkeys(found.layers):
            at = [place for place, own in enumerate(found.layers) if own == layer]
            changes[layer] = partial(transferred, maps=maps, places=at)
        nothing = torch.zeros(maps.shape[:2], device=model.device, dtype=torch.float32)
        return Asked(nothing, found.rates.double().numpy(), changes)


def transferred(rows: torch.Tensor, tree: DraftTree, maps: torch.Tensor, places: list[int]) -> torch.Tensor:
    """States [n, hidden] of a tree's nodes; those of mask nodes are predicted from their chain's owner.

    Args:
        maps: [ahead, hidden, hidden], by place in the chain.
        places: Of the nodes that are made here.
    """
    nodes, owners, chain = tree.chains
    made = rows.clone()
    for place in places:
        at = chain == place
        made[nodes[at]] = rows[owners[at]] @ maps[place].T.to(rows.dtype)
    return made
