"""What configurations and checkpoints of several families say of their Mamba-2 layers in one way."""

from __future__ import annotations

from typing import Any

from decodery.core.errors import CorruptFile

_ENDLESS_STEP = 1e30
_WORDS = ("inf", "Infinity", ".inf")

MIXER = {
    "qkv": "in_proj.weight",
    "output": "out_proj.weight",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "step_bias": "dt_bias",
    "decay": "A_log",
    "skip": "D",
    "gate_norm": "norm.weight",
}
"""What checkpoints call the parts of a recurrent layer, after the name of its mixer."""


def limits(raw: Any, origin: str) -> tuple[float, float]:
    """Bounds of a step; some write an infinite one as a word, or as a record of one."""
    each = raw if isinstance(raw, (list, tuple)) else [0.0, "inf"] if raw is None else []
    plain = [one.get("__float__") if isinstance(one, dict) else one for one in each]
    values = [_ENDLESS_STEP if one in _WORDS else one for one in plain if isinstance(one, (int, float, str))]
    if len(values) == 2 and not any(isinstance(one, (str, bool)) for one in values):
        # Integers may be too large for a float.
        least, most = (float(max(min(one, _ENDLESS_STEP), -1.0)) for one in values)
        if 0.0 <= least < most:
            return least, most
    raise CorruptFile(f"{origin}: time_step_limit should be two numbers, 0 or more, in ascending order")
