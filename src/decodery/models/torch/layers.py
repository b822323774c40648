"""The layers of a transformer in PyTorch: every family, in floating point or integers, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn.functional import rms_norm

from decodery.core.errors import UnsupportedModel

from ..config import ModelConfig, Rope
from ..hooks import HookPoint, Hooks
from ..layer_plan import LayerStep
from . import alternating, fused
from .attention import Rows, rotate
from .gated_conv import GatedConvolution
from .latent import queries_and_latents, values_of
from .mixture import Mixture
from .one_pass import Mixer, Pass, to_device
from .recurrence import Recurrence
from .rope import rope_angles, rope_table
from .shared_blocks import with_use
from .short_conv import ShortConvolution
from .weights import Layer, Weights


class TorchLayers:
    """Runs the layers of `Weights` as `ModelConfig` describes them.

    Attributes:
        pages_together: Whether attention of all texts of a pass is one call, over pages that lie on the device. Off the
            CPU it is; there every text has its own, whose result does not depend on the others.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.dtype
        self.device = weights.norm.device
        self.pages_together = self.device.type != "cpu"
        self._tables: dict[tuple[Rope, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._mixtures: dict[int, Mixture] = {}
        kinds = ((Recurrence, config.recurrent), (GatedConvolution, config.convolves))
        self._mixers: dict[int, Mixer] = {
            index: kind(layer, index, config)
            for kind, has in kinds
            for index, layer in enumerate(weights.layers)
            if has(index)
        }
        self._convolutions = {
            index: ShortConvolution(layer, index, config)
            for index, layer in enumerate(weights.layers if config.short_conv is not None else ())
        }
        # By layer, the block it shares as it runs it, and what is after that.
        self._sharing = {
            layer: (with_use(weights.shared[turn % len(weights.shared)], use), use.back)
            for turn, (layer, use) in enumerate(zip(config.sharing, weights.uses, strict=True))
        }

    def blocks(self, hidden: torch.Tensor, step: Rows, run: Sequence[LayerStep], hooks: Hooks) -> torch.Tensor:
        """Run some layers over [N, hidden], with positions, caches and masks taken from `step`."""
        if self._sharing and run and run[0].layer:
            raise UnsupportedModel("blocks that layers share read what enters the first layer: begin this model there")
        entered = hidden
        if self.config.alternating is not None:
            return self._alternating(hidden, step, run, hooks)
        for stop in run:
            hidden = self._block(stop, hidden, step, hooks, entered)
            layer = self.weights.layers[stop.layer]
            if layer.input_gate is not None:
                hidden = hidden + self._given(stop.layer, hidden, step)
            if layer.scale is not None:
                hidden = hidden * layer.scale.to(hidden.dtype)
            hidden = hooks.visit(HookPoint("residual", stop.layer + 1), hidden)
        return hidden

    def _alternating(self, hidden: torch.Tensor, step: Rows, run: Sequence[LayerStep], hooks: Hooks) -> torch.Tensor:
        """`blocks`, of a model with several streams; at hook points there is the one that layers read."""
        config, own = self.config, self.weights.inputs[0]
        assert config.alternating is not None
        active, streams = config.alternating.active, alternating.spread(own, config, hidden)
        for stop in run:
            layer = self.weights.layers[stop.layer]
            before = alternating.predicted(layer, config, streams)
            made = self._block(stop, before[:, active].contiguous(), step, hooks, hidden)
            streams = alternating.corrected(layer, config, before, made)
            streams[:, 1:] += self._given(stop.layer, alternating.scaled(layer, config, streams), step)[:, None]
            streams[:, active] = hooks.visit(HookPoint("residual", stop.layer + 1), streams[:, active])
        return alternating.merged(own, config, streams)

    def _given(self, index: int, hidden: torch.Tensor, step: Rows) -> torch.Tensor:
        """What a layer adds to [N, hidden] because of the tokens of its rows."""
        layer = self.weights.layers[index]
        assert isinstance(step, Pass) and layer.input_gate is not None and layer.input_out is not None
        opened = self._activation(layer.input_gate(hidden)) * step.inputs[:, index]
        return self._norm(layer.input_out(opened), layer.input_norm)

    def _block(
        self, stop: LayerStep, hidden: torch.Tensor, step: Rows, hooks: Hooks, entered: torch.Tensor
    ) -> torch.Tensor:
        config, index = self.config, stop.layer
        layer = self.weights.layers[index]
        turned = hidden if layer.attention_shortcut is None else hidden @ layer.attention_shortcut
        ahead: torch.Tensor | None = None
        if stop.attention and config.has_mixer(index):
            read = hidden + self._shared(index, hidden, entered, step) if index in self._sharing else hidden
            normed = self._reads(read, layer.attention_norm)
            context = self._attention(index, layer, normed, step)
            branch = layer.output(hooks.visit(HookPoint("head_out", index), context))
            if layer.mix_in is not None and layer.mix_out is not None:
                assert isinstance(step, Pass)
                branch = branch + layer.mix_out(step.mix(self._mixers[index], layer.mix_in(normed)))
            if (more := self._beside(index, normed, step)) is not None:
                branch = branch + more
            branch = self._adds(branch, layer.attention_norm, layer.post_attention_norm)
            turned, ahead = self._added(stop, turned, hooks.visit(HookPoint("attn_out", index), branch))
            if layer.laurel_in is not None and layer.laurel_out is not None:
                learned = self._norm(layer.laurel_out(layer.laurel_in(normed)), layer.laurel_norm)
                turned = (turned + normed + learned) * 2**-0.5
        read, hidden = hidden if config.parallel else turned, turned
        turned = hidden if layer.mlp_shortcut is None else hidden @ layer.mlp_shortcut
        if stop.mlp and config.has_mlp(index):
            normed = self._reads(read, layer.mlp_norm) if ahead is None else ahead
            if index in self._mixtures and config.experts_beside:
                branch = self._beside_experts(index, read, normed, hooks)
            elif index in self._mixtures:
                branch, chosen = self._mixtures[index](normed, hooks.shared)
                hooks.chosen.append(chosen)
            elif config.gated:
                branch = layer.down(fused.gated(layer.gate_up(normed), config.activation, config.reach(index)))
            else:
                branch = layer.down(self._activation(layer.gate_up(normed)))
            branch = self._adds(branch, layer.mlp_norm, layer.post_mlp_norm)
            turned = self._joined(turned + hooks.visit(HookPoint("mlp_out", index), branch), layer.mlp_norm)
        return turned

    def _beside_experts(self, index: int, read: torch.Tensor, normed: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        """What an MLP finds in normed rows and experts in norms of their own, each normed, added up."""
        layer = self.weights.layers[index]
        assert layer.shared_gate_up is not None and layer.shared_down is not None and layer.router_scale is not None
        found = layer.shared_down(fused.gated(layer.shared_gate_up(normed), self.config.activation))
        routed = self._norm(read, None) * layer.router_scale.to(read.dtype) * self.config.hidden_size**-0.5
        rows = self._norm(read, layer.experts_norm)
        more, chosen = self._mixtures[index](rows, hooks.shared, routed)
        hooks.chosen.append(chosen)
        return self._norm(found, layer.post_shared_norm) + self._norm(more, layer.post_experts_norm)

    def _activation(self, gate: torch.Tensor) -> torch.Tensor:
        return fused.activated(gate, self.config.activation)

    def _reads(self, stream: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """What a sublayer reads of the stream."""
        plain = self.config.norms_after or self.config.joined_norms
        return stream if plain else self._norm(stream, norm)

    def _adds(self, branch: torch.Tensor, norm: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        """What a sublayer adds to the stream."""
        if self.config.norms_after:
            return self._norm(branch, norm)
        if self.config.residual_scale != 1.0:
            branch = branch * self.config.residual_scale
        return branch if post_norm is None else self._norm(branch, post_norm)

    def _added(
        self, stop: LayerStep, stream: torch.Tensor, branch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream after attention, and its norm for the MLP where a kernel makes both."""
        config, layer = self.config, self.weights.layers[stop.layer]
        apart = config.parallel or config.norms_after or config.joined_norms or config.centred_norms
        if apart or layer.laurel_in is not None or not (stop.mlp and config.has_mlp(stop.layer)):
            kernels = None
        else:
            kernels = fused.kernels_for(stream)
        if kernels is None:
            return self._joined(stream + branch, layer.attention_norm), None
        found: tuple[torch.Tensor, torch.Tensor] = kernels.add_norm(stream, branch, layer.mlp_norm, config.norm_eps)
        return found

    def _joined(self, stream: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The stream after a sublayer."""
        return self._norm(stream, norm) if self.config.joined_norms else stream

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return rms_norm(rows, rows.shape[-1:], None, self.config.norm_eps)
        return fused.normed(rows, weight, self.config.norm_eps, centred=self.config.centred_norms)

    def _attention(self, index: int, layer: Layer, normed: torch.Tensor, step: Rows) -> torch.Tensor:
        if index in self._mixers and layer.mix_in is None:
            assert isinstance(step, Pass)
            projected = layer.qkv(normed)
            if layer.steps is not None:
                projected = torch.cat((projected, layer.steps(normed)), dim=1)
            return step.mix(self._mixers[index], projected)
        mix = None
        if index in self._convolutions:
            assert isinstance(step, Pass)
            mix = partial(step.convolve, self._convolutions[index], normed)
        config, units = self.config, self.config.norms_units(index)
        shape = config.head_shape(index)
        if config.kv_layer(index) != index:
            shape = (0, shape[1])
        queries, keys, values = self._heads(layer, normed, *step.angles(index), mix, units=units, shape=shape)
        context = step.attend(index, queries, keys, values)
        if layer.out_gate is not None:
            context = context * layer.out_gate(normed).sigmoid()
        return context if config.latent is None else values_of(layer, config, context)

    def _beside(self, index: int, normed: torch.Tensor, step: Rows) -> torch.Tensor | None:
        """What is added to a layer's attention after its output matrix: [N, hidden]; None for nothing."""
        return None

    def _shared(self, index: int, hidden: torch.Tensor, entered: torch.Tensor, step: Rows) -> torch.Tensor:
        """What a block that layers share makes for one of them of the stream and of what entered the first layer."""
        block, back = self._sharing[index]
        normed = self._norm(torch.cat((hidden, entered), dim=1), block.attention_norm)
        context = step.attend(index, *self._heads(block, normed, *step.angles(index)))
        normed = self._norm(block.output(context), block.mlp_norm)
        return back(block.down(fused.gated(block.gate_up(normed), self.config.activation)))

    def _heads(
        self,
        layer: Layer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mix: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        units: bool = False,
        shape: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [N, heads, head_dim] of a layer's normed rows; cos and sin: [N, 1, head_dim / 2].

        mix: what becomes of them [N, all heads * head_dim] before they are turned.
        units: whether queries and keys are normed without weights.
        shape: key-value heads and their width, None for those that all layers have.
        """
        config = self.config
        if config.latent is not None:
            queries, keys = queries_and_latents(layer, config, normed, cos, sin)
            return queries, keys, keys
        heads, (kv_heads, dim) = config.num_heads, shape or (config.num_kv_heads, config.head_dim)
        projected = layer.qkv(normed)
        if mix is not None:
            projected = mix(projected)
        turning, values = projected.view(-1, heads + 2 * kv_heads, dim).split((heads + kv_heads, kv_heads), dim=1)
        if config.unit_values:
            values = self._norm(values, None)
        apart = units or config.wide_qk_norm or config.norms_after_rope or config.centred_norms
        if (kernels := None if apart else fused.kernels_for(projected)) is not None:
            # Layers without keys of their own have no norm of these.
            key_norm = layer.q_norm if layer.k_norm is None else layer.k_norm
            norms = (layer.q_norm, key_norm) if config.qk_norm else None
            turned = kernels.turn(projected, heads, kv_heads, cos, sin, norms, config.norm_eps)
        else:
            turned = self._turned(layer, turning, kv_heads, cos, sin, units)
        queries, keys = turned.split((heads, kv_heads), dim=1)
        if layer.operator is not None:
            queries = torch.einsum("nhd,hde->nhe", queries, layer.operator)
        return queries, keys, values

    def _turned(
        self, layer: Layer, turning: torch.Tensor, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor, units: bool
    ) -> torch.Tensor:
        """Queries and keys [N, heads + kv_heads, head_dim] after norms of theirs and the rotation."""
        config, heads = self.config, self.config.num_heads
        if config.norms_after_rope:
            turning = rotate(turning, cos, sin)
        if units:
            turning = self._norm(turning, None)
        if config.wide_qk_norm or config.qk_norm:
            queries, keys = turning.split((heads, kv_heads), dim=1)
            if config.wide_qk_norm:
                queries = self._norm(queries.flatten(1), layer.q_norm).view_as(queries)
                keys = self._norm(keys.flatten(1), layer.k_norm).view_as(keys)
            else:
                queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
            turning = torch.cat((queries, keys), dim=1)
        # Short operations cost the same for a few heads more.
        return turning if config.norms_after_rope else rotate(turning, cos, sin)

    def keys_and_values(
        self, index: int, hidden: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, head_dim] of rows [n, hidden] that enter a layer."""
        return self.heads(index, hidden, positions)[1:]

    def heads(
        self, index: int, hidden: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] of rows [n, hidden]."""
        if self._convolutions:
            raise UnsupportedModel("what this model's layers keep of a row is made of the rows before it too")
        if self.config.head_shapes or self.config.reused_layers:
            raise UnsupportedModel("heads of this model's layers differ, or have no keys of their own")
        layer = self.weights.layers[index]
        cos, sin = (each[:, None].to(self.dtype) for each in self.angles(self.config.layer_rope(index), positions))
        normed = self._reads(hidden, layer.attention_norm)
        return self._heads(layer, normed, cos, sin, units=self.config.norms_units(index))

    def angles(self, rope: Rope, positions: np.ndarray, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, dim / 2] float32 of the rows' positions.

        Args:
            rope: The rotation.
            positions: [N] int64.
            dim: Of a head, None for the configuration's.
        """
        dim = dim or self.config.head_dim
        beyond = positions >= self.config.max_positions
        if beyond.any():
            # A text that goes on beyond the context may go on for ever: no table of that, and exact however far.
            found = self.angles(rope, np.where(beyond, 0, positions), dim)
            far = rope_angles(rope, dim, torch.from_numpy(positions[beyond]).double())
            for each, exact in zip(found, far, strict=True):
                each[to_device(np.flatnonzero(beyond), self.device)] = exact.to(self.device)
            return found
        table = self.angle_table(rope, int(positions.max()) + 1, dim)
        index = to_device(positions, self.device)
        return table[0][index], table[1][index]

    def angle_table(self, rope: Rope, positions: int, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [., dim / 2] float32 of so many positions of the context, or more; see `angles`."""
        dim = dim or self.config.head_dim
        table = self._tables.get((rope, dim))
        if table is None or len(table[0]) < positions:
            # Tables grow by doubling: a model may allow 131,072 positions and see three hundred.
            size = min(max(1024, 2 * positions), self.config.max_positions)
            cos, sin = rope_table(rope, dim, size)
            table = self._tables[rope, dim] = cos.to(self.device), sin.to(self.device)
        return table
