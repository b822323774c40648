"""Attention over latents as the native pass reads it: each head's two matrices, and what makes queries in two steps."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from decodery.core.native.kernels import address
from decodery.core.native.structs import LatentStruct, LinearStruct

from ..config import ModelConfig
from ..torch.latent import EPS

if TYPE_CHECKING:
    from ..torch.weights import Layer


class Latents:
    """What one layer keeps latents with.

    Args:
        up: What makes queries of `layer.q_norm`'s rows, None where they are made of the layer's.
    """

    def __init__(self, layer: Layer, config: ModelConfig, up: LinearStruct | None) -> None:
        latent = config.latent
        assert latent is not None and layer.heads_up is not None
        narrow = layer.heads_up.dtype == torch.bfloat16
        whole = layer.heads_up.detach().to(torch.bfloat16 if narrow else torch.float32)
        heads = whole.unflatten(0, (config.num_heads, latent.plain + latent.value))
        keys, values = (heads[:, : latent.plain].contiguous(), heads[:, latent.plain :].transpose(1, 2).contiguous())
        self._alive = keys, values
        shape = config.num_heads, latent.plain, latent.rank
        self._struct = LatentStruct(
            LinearStruct() if up is None else up, address(keys, whole.dtype, *shape),
            address(values, whole.dtype, config.num_heads, latent.rank, latent.value), latent.rank, latent.turned,
            latent.plain, latent.value, int(narrow), EPS,
        )  # fmt: skip

    @property
    def address(self) -> int:
        """Where the kernels find them."""
        return ctypes.addressof(self._struct)
