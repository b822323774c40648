"""What a pass is taken to cost before any was seen, by the size of the model."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np
import torch

from decodery.core.native.kernels import kernel_sets
from decodery.models.footprint import precision, weight_bytes
from decodery.models.protocol import LanguageModel

_BYTES = {"int4": 0.57, "int8": 1.0, "bfloat16": 2.0, "float16": 2.0, "float64": 8.0}
"""Of a weight, by precision; 4 of any other."""
_READ, _MOST_READ = 14e9, 60e9
"""Bytes per second that one thread reads, and that all do."""
_INTEGERS = {"AMX": 118e9, "AVX-512 VNNI": 118e9, "AVX2 VNNI": 70e9, "AVX2": 35e9, "portable C++": 3e9}
"""Multiplications per second and thread of integer weights, by kernels; `_NEON` of others."""
_NEON, _FLOATS, _ATTENTION = 50e9, 20e9, 18e9
"""The same of kernels for Arm, of floats, and of attention."""
_GPU_READ, _GPU, _GPU_LAUNCH = 1.5e12, 100e12, 3e-3
"""Bytes and multiplications per second of a GPU, and seconds that a pass takes however small it is."""
_TEXT = 1e-4
"""Seconds beside the pass for each text."""
_UNKNOWN = 50e6
"""Bytes of weights of a model that does not show them."""


@dataclass(frozen=True)
class PriorPrices:
    """Seconds of a pass before any was seen: to read the weights or, if longer, to multiply by them.

    Attributes:
        read: Seconds to read all weights.
        row: Seconds to multiply one row by them.
        token: Seconds for each token in a text's cache, once.
        row_token: Seconds for each token in a cache and each row that attends to it.
        text: Seconds beside the pass for each text.
    """

    read: float
    row: float
    token: float = 0.0
    row_token: float = 0.0
    text: float = 0.0

    def seconds(self, rows: np.ndarray, texts: float, context: float) -> np.ndarray:
        """Seconds [n] of steps of `rows` [n] rows of so many texts after so many tokens each."""
        attended = context * (self.token * texts + self.row_token * rows)
        # Near the number of rows at which both take equally long neither hides all of the other.
        return np.hypot(self.read, self.row * rows) + attended + self.text * texts

    def of(self, rows: int, texts: float, context: float) -> float:
        """`seconds` of one number of rows."""
        attended = context * (self.token * texts + self.row_token * rows)
        return hypot(self.read, self.row * rows) + attended + self.text * texts


def prior_prices(model: LanguageModel) -> PriorPrices:
    """Of this model on this kind of machine; after the first steps only the shape matters."""
    kept, read = precision(model), float(weight_bytes(model)) or _UNKNOWN
    weights = read / _BYTES.get(kept, 4.0)
    config = model.config
    attended = 2.0 * config.num_layers * config.num_heads * config.head_dim
    if model.device.type != "cpu":
        return PriorPrices(_GPU_LAUNCH + read / _GPU_READ, weights / _GPU, attended / _GPU_READ, attended / _GPU, _TEXT)
    threads = torch.get_num_threads()
    speed = min(_READ * threads, _MOST_READ)
    integers = _INTEGERS.get(next(iter(kernel_sets()), "portable C++"), _NEON)
    rate = (integers if kept in ("int4", "int8") else _FLOATS) * threads
    return PriorPrices(read / speed, weights / rate, attended / speed, attended / (_ATTENTION * threads), _TEXT)
