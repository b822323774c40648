"""What every layer reads of the token itself, as in Gemma 3n and Gemma 4."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from decodery.core.errors import UnsupportedModel

from ..batch import Batch
from ..config import ModelConfig
from ..loaders.in_place import InPlace
from .one_pass import to_device
from .portable import rms_norm as norm_in_order
from .weights import Dense, Linear, TokenInputs


def token_inputs(
    own: TokenInputs, config: ModelConfig, hidden: torch.Tensor, batch: Batch, packed: Linear | None = None
) -> torch.Tensor:
    """[N, layers, layer_inputs] of the rows of a pass, from their tokens and embeddings [N, hidden].

    Args:
        packed: The projection where kernels run it: then each row's bits are its own.

    Raises:
        UnsupportedModel: For rows that are no tokens.
    """
    width = config.layer_inputs
    assert own.projection is not None and own.norm is not None
    project = own.projection if packed is None else packed
    made = (project(hidden) * config.hidden_size**-0.5).unflatten(-1, (config.num_layers, width))
    norm = own.norm.to(made.dtype)
    if packed is None:
        made = rms_norm(made, (width,), norm, config.norm_eps)
    else:
        made = norm_in_order(made, norm, config.norm_eps)
    parts = [segment.tokens for segment in batch.segments if segment.tokens is not None and segment.states is None]
    if len(parts) != len(batch.segments):
        raise UnsupportedModel(f"layers of {config.family} read tokens: rows that are given as states cannot be run")
    tokens = torch.cat([to_device(part, hidden.device) for part in parts])
    tokens = torch.where(tokens < config.layer_tokens, tokens, 0)
    looked_up = _rows(own, tokens).to(made.dtype).view_as(made)
    return (made + looked_up * width**0.5) * 2**-0.5


def _rows(own: TokenInputs, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(own.table, InPlace):
        return own.table.rows.expanded(tokens.numpy())
    assert isinstance(own.table, Dense)
    return own.table.weight[tokens]
