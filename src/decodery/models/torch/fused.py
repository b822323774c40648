"""What a layer does to rows between its matrices: by a kernel each on a CUDA device, else in PyTorch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from ..config import CLAMPED
from ..cuda.launches import launches


def kernels_for(rows: torch.Tensor) -> ModuleType | None:
    """`cuda.fused_kernel` where it serves rows [N, .]; None where there is none, and PyTorch does it."""
    serves = rows.device.type == "cuda" and rows.dtype.itemsize <= 4 and rows.dim() == 2
    if not serves or torch.is_grad_enabled() or not launches(rows.device):
        return None
    from ..cuda import fused_kernel

    return fused_kernel


def normed(rows: torch.Tensor, weight: torch.Tensor, eps: float, *, centred: bool) -> torch.Tensor:
    """Rows [..., width] after their norm, whose weights may have more bits.

    Args:
        rows: The rows.
        weight: [width], or [2 width] scales and shifts of centred norms.
        eps: Of the norm.
        centred: Whether the mean is taken off.
    """
    kernels = None if centred else kernels_for(rows)
    if kernels is not None:
        found: torch.Tensor = kernels.norm(rows, weight, eps)
        return found
    wide = torch.promote_types(rows.dtype, weight.dtype)
    read, weight = rows.to(wide), weight.to(wide)
    if centred:
        scale, shift = weight.chunk(2)
        return layer_norm(read, rows.shape[-1:], scale, shift, eps).to(rows.dtype)
    return rms_norm(read, rows.shape[-1:], weight, eps).to(rows.dtype)


def activated(gate: torch.Tensor, kind: str) -> torch.Tensor:
    """Gates after the activation of this name."""
    if kind == "relu2":
        return gate.relu().square()
    if kind in ("silu", CLAMPED):
        return silu(gate)
    return gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated(rows: torch.Tensor, kind: str, reach: float | None = None) -> torch.Tensor:
    """[N, inner] activated gates times what they open.

    Args:
        rows: [N, 2 inner], the gates first.
        kind: The activation.
        reach: How many standard deviations above their mean gates begin, None for all of them.
    """
    kernels, known = kernels_for(rows), "silu" if kind == CLAMPED else kind
    if kernels is not None and reach is None and known in kernels.GATES:
        found: torch.Tensor = kernels.gate(rows, known)
        return found
    gate, up = rows.chunk(2, dim=-1)
    if reach is not None:
        middle, spread = gate.mean(dim=-1, keepdim=True), gate.std(dim=-1, keepdim=True, unbiased=False)
        gate = (gate - (middle + spread * reach)).relu()
    return activated(gate, kind) * up
