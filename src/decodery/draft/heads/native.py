"""A draft head of one layer in one native call: from the target's states to the words it would say."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch

from ...model.int4 import Int4Linear
from ...model.int8 import Int8Linear
from ...model.kernels import (
    DraftStruct,
    GuessStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    PassStruct,
    RunStruct,
    SegmentStruct,
    check,
    library,
)
from ...model.packed import Arena, Packed, packed_size
from ...model.weights import Linear
from .parts import DecoderLayer, Held

_LINEARS = ("qkv", "output", "gate_up", "down")
_FIRST = (c_int32 * 1)(0)
"""The layers of the pass, and what is left out of them: one, and nothing."""


class NativeHead:
    """The layer of a head, what enters it and what leaves it, for the kernels.

    enter: states side by side to features; words: features, normed by `norm`, to logits. What attention reads is a
    token's embedding, normed by `token_norm`, beside a feature, normed by `feature_norm`; where `norm_first` is set the
    residual stream begins with the normed feature, else with the feature. Norms: [hidden] each.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        enter: Linear,
        words: Linear,
        norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        norm_first: bool,
    ) -> None:
        shape = self.shape = layer.shape
        self._layer = layer
        # In the order they are read in.
        linears: dict[str, Any] = {"enter": enter}
        linears |= {name: layer.parts.linear(f"{layer.prefix}{name}") for name in _LINEARS}
        linears["words"] = words
        sizes = [packed_size(each, gated=name == "gate_up") for name, each in linears.items()]
        arena = Arena(sum(sizes))
        packed = {name: Packed(each, arena, gated=name == "gate_up") for name, each in linears.items()}
        kept = [each.detach().float().contiguous() for each in (layer.parts[f"{layer.prefix}mlp_norm.weight"], *norms)]
        mlp_norm, token_norm, feature_norm, norm = (each.data_ptr() for each in kept)
        made = LayerStruct(*(packed[name].struct for name in _LINEARS), None, mlp_norm)
        layers = (LayerStruct * 1)(made)
        self.outputs = packed["words"].outputs
        model = ModelStruct(
            layers, norm, packed["words"].struct, shape.hidden, shape.inner, shape.heads, shape.kv_heads,
            shape.head_dim, 0, shape.eps, shape.head_dim**-0.5,
        )  # fmt: skip
        entered: LinearStruct = packed["enter"].struct
        self._draft = DraftStruct(
            model, entered, token_norm, feature_norm, entered.inputs // shape.hidden, int(norm_first)
        )
        self._alive = [packed, kept, layers]

    @staticmethod
    def runs(layer: DecoderLayer, linears: Sequence[Linear]) -> bool:
        """Whether the kernels can run a head of this layer with these linear layers beside it."""
        own = [layer.parts.linear(f"{layer.prefix}{name}") for name in _LINEARS]
        whole = all(isinstance(each, (Int8Linear, Int4Linear)) for each in (*own, *linears))
        return whole and layer.shape.window is None and library() is not None

    def __call__(
        self,
        held: Held,
        given: Sequence[torch.Tensor],
        embedded: torch.Tensor,
        positions: np.ndarray,
        mask: np.ndarray | None,
        *,
        entering: bool,
        spoken: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows behind what is held: text in order, or, with a mask [n, tentative rows + n], of a tree.

        given: the target's states [n, hidden] of each depth where `entering`, else the features [n, hidden] alone.
        embedded: [n, hidden]. All of them float32. Returns the features behind the layer [n, hidden], and the logits
        [spoken, outputs] after the last rows.
        """
        lib = library()
        assert lib is not None
        n, shape = len(embedded), self.shape
        given, embedded = [each.contiguous() for each in given], embedded.contiguous()
        features = torch.empty(n, shape.hidden) if entering else given[0].clone()
        logits = torch.empty(spoken, self.outputs)
        places = np.ascontiguousarray(positions, dtype=np.int64)
        cos, sin = self._layer.angles(places)
        first = held.reserve(n, text=mask is None)
        seen = None if mask is None else np.ascontiguousarray(mask)
        kinds, heads, _, _ = held.data.stride()
        runs = RunStruct(held.data.data_ptr(), 0, kinds, heads, 0, held.data.shape[2])
        length = c_int64(held.length)
        segment = SegmentStruct(
            ctypes.pointer(runs), ctypes.addressof(length), None, places.ctypes.data,
            None if seen is None else seen.ctypes.data, 0, 1, n, first - held.length, 0,
        )  # fmt: skip
        first_layer = ctypes.addressof(_FIRST)
        passed = PassStruct(features.data_ptr(), ctypes.pointer(segment), first_layer, first_layer)
        passed.cos[0], passed.sin[0] = cos.ctypes.data, sin.ctypes.data
        passed.rows, passed.segment_count, passed.run_count = n, 1, 1
        states = (c_void_p * len(given))(*(each.data_ptr() for each in given)) if entering else None
        guess = GuessStruct(
            passed, None if states is None else ctypes.addressof(states), embedded.data_ptr(), logits.data_ptr(), spoken
        )
        check(lib.decodery_draft(ctypes.addressof(self._draft), ctypes.addressof(guess)))
        held.wrote(n, text=mask is None)
        return features, logits
