"""Blocks of attention and MLP that several layers share, each with something of its own added to their matrices.

The Zamba2 Suite (2024): before some of its Mamba-2 layers a block reads the stream and the embeddings side by side, and
what it finds is added to what the layer reads, not to the stream. Few blocks serve many layers, in turns; every layer
adds matrices of low rank to those of its block, and has keys and values of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .weights import Layer, Linear, Use


@dataclass
class Added:
    """A linear layer of which every part of the outputs has a matrix of low rank added.

    Attributes:
        first: In -> a rank for each of the parts.
        seconds: Rank -> outputs, part by part.
    """

    base: Linear
    first: Linear
    seconds: tuple[Linear, ...]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]"""
        thin = self.first(rows).chunk(len(self.seconds), dim=-1)
        return self.base(rows) + torch.cat([each(part) for each, part in zip(self.seconds, thin, strict=True)], dim=-1)


def with_use(block: Layer, use: Use) -> Layer:
    """A shared block as one layer runs it; its own matrices stay where they are."""
    found = replace(block, gate_up=Added(block.gate_up, use.gate_up_in, (use.gate_up_out,)))
    if use.qkv_in is None or use.q_out is None or use.k_out is None or use.v_out is None:
        return found
    return replace(found, qkv=Added(block.qkv, use.qkv_in, (use.q_out, use.k_out, use.v_out)))
