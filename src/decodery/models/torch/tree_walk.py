"""Which nodes of drafted trees the tokens chosen after them lead to, on the device where these tokens are."""

from __future__ import annotations

import torch

TWIN = -2
"""Stands for the token of a node that an earlier sibling has too: no choice leads to it."""


def walk(picks: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, doublings: int) -> torch.Tensor:
    """[rows] bool, the nodes that are reached from their root by the tokens chosen on the way.

    Roots are. What is last of a tree is followed by the token chosen there.

    Args:
        picks: [rows] the token chosen after each node.
        tokens: [rows] the nodes, `TWIN` where an earlier sibling has the same one.
        parents: [rows] int64, which row each node follows; a root follows itself.
        doublings: Such that no node is deeper than 2 to this power.
    """
    rows = torch.arange(len(parents), device=parents.device)
    reached = (picks[parents] == tokens) | (parents == rows)
    # After k rounds a node knows of its 2^k nearest ancestors.
    for _ in range(doublings):
        reached, parents = reached & reached[parents], parents[parents]
    return reached
