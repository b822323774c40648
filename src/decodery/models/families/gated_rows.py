"""Which rows of their tensors the parts of Gated DeltaNet layers and of gated attention are."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from ..config import GatedDelta, ModelConfig

GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class Span(NamedTuple):
    """Rows of a tensor in which parts take turns: `size` of every `apart` rows from `first` on."""

    first: int
    size: int
    apart: int
    turns: int

    def rows(self) -> torch.Tensor:
        """[turns * size] int64, the rows of the tensor."""
        firsts = self.first + self.apart * torch.arange(self.turns, device="cpu")[:, None]
        return (firsts + torch.arange(self.size, device="cpu")).flatten()


def gate_span(name: str, config: ModelConfig) -> Span | None:
    """Which rows queries and their gates are: a head's gate stands after its queries."""
    dim = config.head_dim
    if not config.gated_attention or name not in ("q", "out_gate"):
        return None
    return Span(dim * (name == "out_gate"), dim, 2 * dim, config.num_heads)


def steps_span(name: str, config: ModelConfig) -> Span | None:
    """Which rows steps are made of, where both parts stand together group by group: Qwen3-Next."""
    delta = config.delta
    if config.family != "qwen3_next" or delta is None or name not in ("mix_written", "mix_steps"):
        return None
    several = delta.heads // delta.groups
    return Span(several * (name == "mix_steps"), several, 2 * several, delta.groups)


def gated_rows(name: str, config: ModelConfig, order: torch.Tensor) -> torch.Tensor | None:
    """[n] int64, which rows of a folder's tensor a part is, None where the rule of others holds.

    Args:
        order: [head_dim] of a head's queries.
    """
    if (span := gate_span(name, config) or steps_span(name, config)) is not None:
        rows = span.rows()
        return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten() if name == "q" else rows
    if config.family != "qwen3_next" or config.delta is None or name not in ("mix_gate", "mixed"):
        return None
    return _mixed_rows(name, config.delta)


def _mixed_rows(name: str, delta: GatedDelta) -> torch.Tensor:
    """Queries, keys, values and gates of a group stand side by side."""
    values = delta.heads // delta.groups * delta.head_dim
    sizes = {"queries": delta.state, "keys": delta.state, "values": values, "mix_gate": values}
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    wanted = ("mix_gate",) if name == "mix_gate" else ("queries", "keys", "values")
    whole = sum(sizes.values())
    return torch.cat([Span(starts[part], sizes[part], whole, delta.groups).rows() for part in wanted])
