"""The precision that a model is kept in, and the device that it runs on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from decodery.core.errors import SettingsError
from decodery.core.native.kernels import vectorised

_QUANTIZED = {"int4": "int4", "quantized": "int8"}
"""What layers of a quantized GGUF are kept in, by the precision that most of them have there."""


def choose_dtype(dtype: str, precision: str, device: torch.device) -> str:
    """The dtype that "auto" means for a checkpoint of this precision on this device."""
    if dtype != "auto":
        return dtype
    if precision == "int8":
        return "int8"
    if precision in _QUANTIZED and device.type == "cpu":
        return _QUANTIZED[precision]
    return "bfloat16" if precision in ("bfloat16", *_QUANTIZED) and computes_bfloat16(device) else "float32"


def choose_own(dtype: str, precision: str, device: torch.device, *, packed: bool = False) -> str:
    """The same for models that this package runs itself.

    Args:
        dtype, precision, device: As there.
        packed: Whether quantized weights may stay packed on a GPU.
    """
    if dtype == "auto" and precision in _QUANTIZED and device.type == "cuda" and packed:
        return _QUANTIZED[precision]
    if dtype == "auto" and precision in ("bfloat16", "float16") and device.type == "cpu" and vectorised():
        return precision
    return choose_dtype(dtype, precision, device)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether PyTorch's bfloat16 products are done in hardware there, not emulated."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return device.type in ("xpu", "mps")
    if platform.machine().lower() in ("aarch64", "arm64"):
        try:
            return " bf16" in Path("/proc/cpuinfo").read_text()
        except OSError:
            return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_device(device: str) -> torch.device:
    """The device of a setting; "auto" is a GPU where PyTorch has one.

    Raises:
        SettingsError: If there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(f"there is no device {device!r} here: leave device at auto, or use cpu") from error
    return chosen
