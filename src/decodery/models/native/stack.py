"""All layers of a model in native calls: int8, int4 or bfloat16 weights, all else in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, c_int32, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.mapped_memory import forget, mapped_files
from decodery.core.native.kernels import address, check, library
from decodery.core.native.structs import LayerStruct, LinearStruct, MixerStruct, ModelStruct

from ..batch import Batch
from ..config import CLAMPED, ModelConfig, Rope
from ..hooks import Hooks
from ..layer_plan import LayerStep
from ..loaders.in_place import InPlace
from .experts import Experts
from .latents import Latents
from .mixers import Mixers
from .packed import Arena, Packed, packed_size
from .streams import AllStreams, LayerStreams, stream_matrices
from .token_inputs import LayerInputs
from .walk import SKIP_ATTENTION, SKIP_MLP, Walk

if TYPE_CHECKING:
    from ..torch.weights import Layer, Weights

Angles = Callable[[Rope, np.ndarray, int], tuple[torch.Tensor, torch.Tensor]]

_OPENINGS = {"silu": 0, "gelu_tanh": 1, CLAMPED: 2, "relu2": 3}
_MOST_PLANS = 256
_HEAD_NORMS = {"q_norm": "q_norm", "k_norm": "k_norm"}
_BEFORE = {name: name for name in ("attention_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm")} | _HEAD_NORMS
_AFTER = {"post_attention_norm": "attention_norm", "post_mlp_norm": "mlp_norm"} | _HEAD_NORMS
"""By norm of `Layer` in csrc/abi.h, that of `weights.Layer`."""


class NativeStack:
    """All layers and the head of a model, in one native call per pass or per visited hook point.

    A row's result depends on that row alone, bit for bit: not on the number of rows, on chunking, on the other
    sequences of the batch or on the shape of a tree. `angles(rope, positions, head_dim)` gives cosines and sines [N,
    head_dim / 2] float32.

    Args:
        mixers: See `Mixers`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        angles: Angles,
        *,
        mixers: Mapping[int, tuple[MixerStruct, Sequence[int]]] | None = None,
    ) -> None:
        self.config = config
        self._angles = angles
        self._alive: list[object] = []
        self._files = mapped_files()
        self._plans: dict[tuple[LayerStep, ...], tuple[Array[c_int32], Array[c_int32], Array[c_void_p]]] = {}
        self.mixers = Mixers(mixers) if mixers else None
        matrices = [_matrices(layer, index, config) for index, layer in enumerate(weights.layers)]
        total = packed_size(weights.head)  # type: ignore[arg-type]
        if config.layer_inputs:
            total += packed_size(weights.inputs[0].projection)  # type: ignore[arg-type]
        streaming = stream_matrices(weights.inputs[0], config) if config.alternating is not None else []
        total += sum(packed_size(linear) for linear in streaming)
        for named in matrices:
            total += sum(
                packed_size(linear, gated=config.gated and name == "gate_up") for name, linear in named.items()
            )
        arena = Arena(total)
        # The largest first: what it is packed from is still in memory then.
        self.project = self._pack(weights.head, arena)
        layers = (LayerStruct * config.num_layers)()
        self.experts: dict[int, Experts] = {}
        # Of rows' embeddings, what layers read of tokens.
        self.inputs_projection: Packed | None = None
        if config.layer_inputs:
            self.inputs_projection = self._pack(weights.inputs[0].projection, arena)
        streams = None
        if streaming:
            streams = AllStreams(config, [self._pack(linear, arena).struct for linear in streaming])
        for index, layer in enumerate(weights.layers):
            structs = {
                name: self._pack(linear, arena, gated=config.gated and name == "gate_up").struct
                for name, linear in matrices[index].items()
            }
            self._add_parts(layers[index], layer, index, structs)
            for name, struct in structs.items():
                setattr(layers[index], name, struct)
            if self.mixers is not None:
                layers[index].mixer = self.mixers.address(index)
            if config.mixes(index):
                experts = self.experts[index] = Experts(layer, config, self._files)
                layers[index].experts = experts.address
            # Where norms are those of what sublayers found, these read the stream as it is.
            norms = _AFTER if config.norms_after else _BEFORE
            for norm, part in norms.items():
                setattr(layers[index], norm, self._pointer(getattr(layer, part), _norm_width(norm, index, config)))
            ones = torch.ones(config.head_shape(index)[1], dtype=torch.float32, device="cpu")
            if config.norms_units(index):
                layers[index].q_norm = layers[index].k_norm = self._pointer(ones, len(ones))
            if config.unit_values:
                layers[index].v_norm = self._pointer(ones, len(ones))
            layers[index].sinks = self._pointer(layer.sinks, config.num_heads)
            layers[index].tempered = int(config.tempers(index))
            layers[index].window = config.window(index) or 0
            layers[index].rope = int(config.turns_locally(index))
            if (reach := config.reach(index)) is not None:
                layers[index].sparse, layers[index].reach = 1, reach
        self._alive += [layers, mixers, streams]
        self._layers = layers
        inner = max((each.down.inputs for each in layers), default=0)
        self._model = ModelStruct(
            layers, self._pointer(weights.norm, config.hidden_size), self.project.struct, config.hidden_size,
            inner, config.num_heads, config.num_kv_heads, config.head_dim,
            _OPENINGS[config.activation], config.norm_eps, config.attention_scale,
            0.0 if config.residual_scale == 1.0 else config.residual_scale,
            int(config.wide_qk_norm), int(config.norms_after_rope or config.unit_norms), config.attention_cap,
            config.logit_cap, None if streams is None else streams.address,
        )  # fmt: skip

    def _add_parts(self, struct: LayerStruct, layer: Layer, index: int, structs: dict[str, LinearStruct]) -> None:
        """What only some families have; takes what is not of every layer from its matrices `structs`."""
        config = self.config
        if config.latent is not None:
            latents = Latents(layer, config, structs.pop("up", None))
            struct.latent = latents.address
            self._alive.append(latents)
            assert layer.heads_up is not None
            forget(layer.heads_up, self._files)
        if config.layer_inputs:
            inputs = LayerInputs(layer, index, config, structs.pop("input_gate"), structs.pop("input_out"))
            struct.inputs = inputs.address
            self._alive.append(inputs)
        if config.alternating is not None:
            streams = LayerStreams(layer, config, structs.pop("laurel_in"), structs.pop("laurel_out"))
            struct.streams = streams.address
            self._alive.append(streams)
        if config.head_shapes:
            struct.kv_heads, struct.head_dim = config.head_shape(index)
        source = config.kv_layer(index)
        struct.reads = 0 if source == index else 1 + source
        if layer.scale is not None:
            struct.scale = float(layer.scale)

    def _pack(self, linear: Any, arena: Arena, *, gated: bool = False) -> Packed:
        packed = Packed(linear, arena, gated=gated)
        self._alive.append(packed)
        if not isinstance(linear, InPlace):
            for tensor in linear.tensors().values():
                forget(tensor, self._files)
        return packed

    @property
    def address(self) -> int:
        """Where the kernels find the model."""
        return ctypes.addressof(self._model)

    def layers(
        self,
        hidden: torch.Tensor,
        batch: Batch,
        run: Sequence[LayerStep],
        hooks: Hooks,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, hidden] -> the residual stream after the layers `run` [N, hidden] float32.

        Every segment's cache must have been reserved for this pass; the rows' keys and values are written to it.

        Args:
            inputs: [N, layers, layer_inputs] float32, what layers read of tokens where they do.
        """
        result = hidden.to(torch.float32, copy=True).contiguous()
        if len(result) and len(run):
            walk = Walk(self, result, batch, run, hooks)
            if inputs is not None and inputs.numel():
                walk.read(inputs.contiguous())
            walk.finish()
            attended = [stop.layer for stop in run if stop.attention and self.config.kv_layer(stop.layer) == stop.layer]
            for segment in batch.segments:
                if segment.cache is not None and attended:
                    # Layers that mix rows have put theirs into further layers of the cache.
                    all_layers = range(self.config.cache_layers)
                    segment.cache.wrote(attended if self.mixers is None else all_layers)
        return result

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection: [M, hidden] -> [M, outputs of the head] float32."""
        return self._rows("decodery_head", hidden, self._model.head.outputs)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> what `project` makes the logits of that `head` caps, if it does."""
        return self._rows("decodery_norm", hidden, self.config.hidden_size)

    def _rows(self, kernel: str, hidden: torch.Tensor, width: int) -> torch.Tensor:
        hidden = hidden.to(torch.float32).contiguous()
        result = torch.empty(len(hidden), width, dtype=torch.float32, device="cpu")
        if len(hidden):
            run = getattr(library(), kernel)
            read = address(hidden, torch.float32, len(result), self.config.hidden_size)
            check(run(self.address, read, len(hidden), address(result, torch.float32, len(hidden), width)))
        return result

    def plan(self, run: Sequence[LayerStep]) -> tuple[Array[c_int32], Array[c_int32], Array[c_void_p]]:
        """The layers of a route, what is left out of each, and no taps: as the kernels read them, made once."""
        key = tuple(run)
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            order, marks = (stop.layer for stop in key), (self.skipped(stop) for stop in key)
            n = len(key)
            self._plans[key] = (c_int32 * n)(*order), (c_int32 * n)(*marks), (c_void_p * n)()
        return self._plans[key]

    def skipped(self, stop: LayerStep) -> int:
        """What is left out of a layer, as the kernels read it."""
        attention = stop.attention and self.config.has_mixer(stop.layer)
        mlp = stop.mlp and self.config.has_mlp(stop.layer)
        return SKIP_ATTENTION * (not attention) | SKIP_MLP * (not mlp)

    def found_width(self, layer: int) -> int:
        """Numbers of a row that a layer's second projection reads."""
        width: int = self._layers[layer].output.inputs
        return width

    def table(self, rope: Rope, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as the kernels read them."""
        cos, sin = self._angles(rope, positions, self.config.rope_dim(rope))
        return cos.contiguous(), sin.contiguous()

    def _pointer(self, values: torch.Tensor | None, width: int) -> int | None:
        if values is None or not len(values):
            return None
        kept = values.detach().to(torch.float32).contiguous()
        self._alive.append(kept)
        return address(kept, torch.float32, width)


def _norm_width(norm: str, layer: int, config: ModelConfig) -> int:
    """Weights of a norm of `Layer` in csrc/abi.h."""
    if norm not in _HEAD_NORMS:
        return config.hidden_size
    if config.latent is not None:
        return config.latent.queries if norm == "q_norm" else config.latent.rank
    kv_heads, dim = config.head_shape(layer)
    return dim * ((config.num_heads if norm == "q_norm" else kv_heads) if config.wide_qk_norm else 1)


def _matrices(layer: Layer, index: int, config: ModelConfig) -> dict[str, Any]:
    """The linear layers of a layer that all rows take, by their names in csrc/abi.h, those of its parts included."""
    mixing = {
        "qkv": layer.qkv, "output": layer.output, "steps": layer.steps, "gate": layer.out_gate, "up": layer.q_up,
        "mix_in": layer.mix_in, "mix_out": layer.mix_out,
    }  # fmt: skip
    named = mixing if config.has_mixer(index) else {}
    if config.mixes(index):
        named = named | {"gate_up": layer.shared_gate_up, "down": layer.shared_down}
    elif config.has_mlp(index):
        named = named | {"gate_up": layer.gate_up, "down": layer.down}
    named = named | {"input_gate": layer.input_gate, "input_out": layer.input_out}
    named = named | {"laurel_in": layer.laurel_in, "laurel_out": layer.laurel_out}
    return {name: linear for name, linear in named.items() if linear is not None}
