"""One lean transformer for families from Llama to Gemma 3, mixtures of experts among them, and for masked diffusion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from ..errors import SettingsError, UnsupportedModel
from .artifact import digest
from .attention import Rows, attend, attend_by_policy, rotate, visibility
from .batch import Batch, Cost, Scores, Segment
from .cache import KVCache
from .config import ModelConfig, Rope
from .graphs import StaticPasses
from .int8 import Int8Linear
from .kept_rows import parents
from .kernels import library
from .latent import queries_and_latents, values_of
from .mixture import Mixture
from .native import NativeStack
from .portable import PortableStack
from .protocol import Capabilities
from .recurrence import Recurrence
from .resident import forget, mapped_files
from .rope import rope_angles, rope_table
from .route import WHOLE, Route, Stop, abreast, attending, groups, stops
from .short_conv import ShortConvolution
from .sites import SITES, Site, Tap, Visits
from .threads import one_thread
from .weights import Layer, Linear, Weights


class Transformer:
    """Runs `Weights` as `ModelConfig` describes them. `embed`, `layers` and `head` can be called apart.

    Rows of all segments share the linear layers; attention works per segment, over its cache and its own rows.
    cache_dtype: of the keys and values that new caches hold, the model's own; float16 where `narrow_caches` was called.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.norm.dtype
        self.device = weights.norm.device
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stack: NativeStack | PortableStack | None = None
        if self.device.type == "cpu" and not config.shortcuts:
            native = library() is not None and not config.experts and config.usual
            if native and (isinstance(weights.head, Int8Linear) or self.dtype.itemsize == 2):
                self._stack = NativeStack(config, weights, self.angles)
                self.dtype = torch.float32
            elif isinstance(weights.head, Int8Linear) and config.portable:
                self._stack = PortableStack(config, weights, self.angles)
        self.cache_dtype = self.dtype
        self._mixtures: dict[int, Mixture] = {}
        if config.experts and self._stack is None:
            mixed = range(config.dense_layers, config.num_layers)
            self._mixtures = {
                index: Mixture(weights.layers[index], config, self._activation, config.floor(index)) for index in mixed
            }
        self._mixers = {
            index: Recurrence(layer, index, config)
            for index, layer in enumerate(weights.layers)
            if config.recurrent(index)
        }
        self._convolutions = {
            index: ShortConvolution(layer, index, config)
            for index, layer in enumerate(weights.layers if config.short_conv is not None else ())
        }
        self.static: StaticPasses | None = None
        if self.device.type == "cuda" and config.static_shapes:
            free, _ = torch.cuda.mem_get_info(self.device)
            self.static = StaticPasses(budget=free // 4)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def capabilities(self) -> Capabilities:
        exact = self._stack is not None
        return Capabilities(
            exact_rows=exact,
            states=True,
            routes=not self.config.shortcuts and not self.config.keeps_order,
            sites=SITES,
            policies=not self.config.keeps_order,
            parts=True,
            gradients=not exact,
        )

    @cached_property
    def fingerprint(self) -> str:
        norms = [norm for layer in self.weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        made = digest(self.weights.embedding, *norms, self.weights.norm)
        forget(self.weights.embedding, mapped_files())
        return made

    def new_cache(self) -> KVCache:
        config = self.config
        shape = config.cache_layers, config.num_kv_heads, config.head_dim
        windowed = [layer for layer in range(config.num_layers) if config.window(layer)]
        # Rows that see later ones are computed out of order, and may come back to what lies behind.
        window = config.sliding_window if windowed and config.causal else None
        return KVCache(*shape, dtype=self.cache_dtype, device=self.device, window=window, windowed=windowed)

    def narrow_caches(self) -> None:
        """Let new caches hold keys and values in float16, from which attention computes in float32 as before.

        Raises SettingsError where the rows of a pass are not computed by themselves, bit for bit.
        """
        if self._stack is None:
            raise SettingsError(
                "keys and values can be kept in float16 where rows are exact: load with dtype int8 or int4, "
                "or in 16 bits on a CPU that has native kernels"
            )
        self.cache_dtype = torch.float16

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), route: Route = WHOLE) -> Scores:
        """See `LanguageModel.forward`. Small passes run at fixed shapes where `static` is set, as it is on a GPU."""
        visits = Visits.of(batch, taps, route, self.config.num_layers, steers=not self.config.keeps_order)
        if self.static is not None and route == WHOLE:
            scores = self.static.forward(self, batch, visits)
            if scores is not None:
                return scores
        if self._stack is not None:
            with one_thread():
                return self._pass(batch, visits, route)
        return self._pass(batch, visits, route)

    def _pass(self, batch: Batch, visits: Visits, route: Route) -> Scores:
        hidden = self.layers(self.embed(batch), batch, visits, route)
        rows, bounds = batch.logit_rows
        if not np.array_equal(rows, np.arange(batch.rows)):
            hidden = hidden[_to_device(rows, self.device)]
        logits = self.head(hidden, visits)
        row_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * self.cache_dtype.itemsize
        costs = [Cost.of(segment, route, self.config.num_layers, row_bytes) for segment in batch.segments]
        if visits.chosen:
            costs = [
                dataclasses.replace(
                    cost, experts=sum(len(each[first : first + cost.rows].unique()) for each in visits.chosen)
                )
                for cost, first in zip(costs, batch.offsets, strict=False)
            ]
        return Scores(logits, bounds, visits.tapped(), batch.offsets, costs)

    def embed(self, batch: Batch) -> torch.Tensor:
        """[N, hidden] what enters the first layer: the tokens' embeddings, or a segment's own states as they are."""
        given = [segment.tokens for segment in batch.segments if segment.tokens is not None and segment.states is None]
        if len(given) == len(batch.segments):
            # One look for all: of many texts with a row each, looking costs more than copying.
            return self.embed_tokens(_to_device(np.concatenate(given), self.device))
        parts = []
        for segment in batch.segments:
            if segment.states is not None:
                parts.append(segment.states.to(self.device, self.dtype))
            else:
                assert segment.tokens is not None
                parts.append(self.embed_tokens(_to_device(segment.tokens, self.device)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.embed_tokens`."""
        if self.weights.kept is not None:
            tokens = self.weights.kept.rows[tokens]
        rows = self.weights.embedding[tokens].to(self.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def layers(
        self, hidden: torch.Tensor, batch: Batch, visits: Visits | None = None, route: Route = WHOLE
    ) -> torch.Tensor:
        """Run the layers of a route over [N, hidden]; returns the residual stream behind them."""
        config, layers = self.config, self.config.num_layers
        visits = Visits.reading(()) if visits is None else visits
        _open_caches(batch, config, None if route == WHOLE else attending(route, layers))
        run = stops(route, layers)
        first = run[0].layer if run else 0
        if self.weights.positions is not None and first == 0:
            hidden = hidden + self.weights.positions[_to_device(batch.positions, self.device)].to(self.dtype)
        if config.joined_norms and first == 0:
            hidden = self._norm(hidden, self.weights.norm)
        hidden = visits.enter(first, hidden)
        stack, step = self._stack, _Pass(self, batch)

        def through(rows: torch.Tensor, some: Sequence[Stop]) -> torch.Tensor:
            return self.blocks(rows, step, some, visits) if stack is None else stack.layers(rows, batch, some, visits)

        if route.abreast == 1:
            return through(hidden, run)
        if visits:
            raise UnsupportedModel("rows that pass several layers at a time cannot be read or changed on their way")
        return abreast(hidden, groups(route, layers), through)

    def blocks(self, hidden: torch.Tensor, step: Rows, run: Sequence[Stop], visits: Visits) -> torch.Tensor:
        """`layers` with positions, caches and masks taken from `step`."""
        for stop in run:
            hidden = self._block(stop, hidden, step, visits)
        return hidden

    def head(self, hidden: torch.Tensor, visits: Visits | None = None) -> torch.Tensor:
        """Final norm and vocabulary projection: [M, hidden] -> [M, vocab] logits, at least float32.

        Tokens that the model has no output for get -inf.
        """
        if visits is not None and Site("final_norm") in visits:
            logits = self.project(visits.visit(Site("final_norm"), self.final_norm(hidden)))
        else:
            logits = self._spread(self.outputs(hidden))
        return logits if visits is None else visits.visit(Site("logits"), logits)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head`, of the tokens alone that have an output."""
        if self._stack is not None:
            return self._stack.head(hidden)
        return self._outputs(self.final_norm(hidden))

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.project`."""
        return self._spread(self._outputs(normed))

    def projection(self, tokens: torch.Tensor | None) -> Linear:
        """See `OpenModel.projection`."""
        head, kept = self.weights.head, self.weights.kept
        if kept is not None:
            raise UnsupportedModel("this model has outputs for some of its tokens only: use the model it was made for")
        return head if tokens is None else head.some(tokens)  # type: ignore[attr-defined]

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.final_norm`."""
        if self._stack is not None:
            return self._stack.final_norm(hidden)
        if self.config.joined_norms:
            return hidden
        return self._norm(hidden, self.weights.norm.to(hidden.dtype))

    def _outputs(self, normed: torch.Tensor) -> torch.Tensor:
        logits = self.weights.head(normed) if self._stack is None else self._stack.project(normed)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, from those of the tokens that have an output."""
        kept = self.weights.kept
        if kept is None:
            return logits
        every = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return every.index_copy_(1, kept.ids, logits)

    def _block(self, stop: Stop, hidden: torch.Tensor, step: Rows, visits: Visits) -> torch.Tensor:
        config, index = self.config, stop.layer
        layer = self.weights.layers[index]
        turned = hidden if layer.attention_shortcut is None else hidden @ layer.attention_shortcut
        if stop.attention:
            context = self._attention(index, layer, self._reads(hidden, layer.attention_norm), step)
            branch = layer.output(visits.visit(Site("head_out", index), context))
            branch = self._adds(branch, layer.attention_norm, layer.post_attention_norm)
            turned = self._joined(turned + visits.visit(Site("attn_out", index), branch), layer.attention_norm)
        read, hidden = hidden if config.parallel else turned, turned
        turned = hidden if layer.mlp_shortcut is None else hidden @ layer.mlp_shortcut
        if stop.mlp and config.intermediate_size:
            normed = self._reads(read, layer.mlp_norm)
            if index in self._mixtures:
                branch, chosen = self._mixtures[index](normed, visits.shared)
                visits.chosen.append(chosen)
            elif config.gated:
                gate, up = layer.gate_up(normed).chunk(2, dim=-1)
                branch = layer.down(self._activation(gate) * up)
            else:
                branch = layer.down(self._activation(layer.gate_up(normed)))
            branch = self._adds(branch, layer.mlp_norm, layer.post_mlp_norm)
            turned = self._joined(turned + visits.visit(Site("mlp_out", index), branch), layer.mlp_norm)
        return visits.visit(Site("residual", index + 1), turned)

    def _activation(self, gate: torch.Tensor) -> torch.Tensor:
        kind = self.config.activation
        return silu(gate) if kind == "silu" else gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")

    def _reads(self, stream: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """What a sublayer reads of the stream."""
        plain = self.config.norms_after or self.config.joined_norms
        return stream if plain else self._norm(stream, norm)

    def _adds(self, branch: torch.Tensor, norm: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        """What a sublayer adds to the stream."""
        if self.config.norms_after:
            return self._norm(branch, norm)
        return branch if post_norm is None else self._norm(branch, post_norm)

    def _joined(self, stream: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The stream behind a sublayer."""
        return self._norm(stream, norm) if self.config.joined_norms else stream

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if self.config.centred_norms:
            assert weight is not None
            scale, shift = weight.chunk(2)
            return layer_norm(rows, rows.shape[-1:], scale, shift, self.config.norm_eps)
        return rms_norm(rows, rows.shape[-1:], weight, self.config.norm_eps)

    def _attention(self, index: int, layer: Layer, normed: torch.Tensor, step: Rows) -> torch.Tensor:
        if index in self._mixers:
            assert isinstance(step, _Pass)
            return step.mix(self._mixers[index], layer.qkv(normed))
        mix = None
        if index in self._convolutions:
            assert isinstance(step, _Pass)
            mix = partial(step.convolve, self._convolutions[index], normed)
        queries, keys, values = self._heads(layer, normed, *step.angles(index), mix)
        context = step.attend(index, queries, keys, values)
        return context if self.config.latent is None else values_of(layer, self.config, context)

    def _heads(
        self,
        layer: Layer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mix: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [N, heads, head_dim] of a layer's normed rows; cos and sin: [N, 1, head_dim / 2].

        mix: what becomes of them [N, all heads * head_dim] before they are turned.
        """
        config = self.config
        if config.latent is not None:
            queries, keys = queries_and_latents(layer, config, normed, cos, sin)
            return queries, keys, keys
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        projected = layer.qkv(normed)
        if mix is not None:
            projected = mix(projected)
        turning, values = projected.view(-1, heads + 2 * kv_heads, dim).split((heads + kv_heads, kv_heads), dim=1)
        if config.wide_qk_norm or config.qk_norm:
            queries, keys = turning.split((heads, kv_heads), dim=1)
            if config.wide_qk_norm:
                queries = self._norm(queries.flatten(1), layer.q_norm).view_as(queries)
                keys = self._norm(keys.flatten(1), layer.k_norm).view_as(keys)
            else:
                queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
            turning = torch.cat((queries, keys), dim=1)
        # Short operations cost the same for a few heads more.
        queries, keys = rotate(turning, cos, sin).split((heads, kv_heads), dim=1)
        if layer.operator is not None:
            queries = torch.einsum("nhd,hde->nhe", queries, layer.operator)
        return queries, keys, values

    def keys_and_values(
        self, index: int, hidden: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds of rows [n, hidden] that enter a layer: keys and values [n, kv_heads, head_dim]."""
        return self.heads(index, hidden, positions)[1:]

    def heads(
        self, index: int, hidden: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] of rows [n, hidden] before a layer."""
        if self._convolutions:
            raise UnsupportedModel("what this model's layers keep of a row is made of the rows before it too")
        layer = self.weights.layers[index]
        cos, sin = (each[:, None].to(self.dtype) for each in self.angles(self.config.layer_rope(index), positions))
        return self._heads(layer, self._reads(hidden, layer.attention_norm), cos, sin)

    def angles(self, rope: Rope, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, head_dim / 2] float32 of the rows' positions."""
        beyond = positions >= self.config.max_positions
        if beyond.any():
            # A text that goes on beyond the context may go on for ever: no table of that, and exact however far.
            found = self.angles(rope, np.where(beyond, 0, positions))
            far = rope_angles(rope, self.config.head_dim, torch.from_numpy(positions[beyond]).double())
            for each, exact in zip(found, far, strict=True):
                each[_to_device(np.flatnonzero(beyond), self.device)] = exact.to(self.device)
            return found
        needed = int(positions.max()) + 1
        table = self._tables.get(rope)
        if table is None or len(table[0]) < needed:
            # Tables grow by doubling: a model may allow 131,072 positions and see three hundred.
            size = min(max(1024, 2 * needed), self.config.max_positions)
            cos, sin = rope_table(rope, self.config.head_dim, size)
            table = self._tables[rope] = cos.to(self.device), sin.to(self.device)
        index = _to_device(positions, self.device)
        return table[0][index], table[1][index]


class _Pass:
    """What all layers of one pass share: rotation angles, attention masks and the caches."""

    def __init__(self, model: Transformer, batch: Batch) -> None:
        self.model = model
        self.positions = batch.positions
        self.spans: list[tuple[Segment, int, int]] = [
            (segment, first, first + len(segment))
            for segment, first in zip(batch.segments, batch.offsets, strict=False)
        ]
        self._angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[tuple[int, bool, int], torch.Tensor | None] = {}
        self._lines: dict[int, torch.Tensor | None] = {}

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.model.config.layer_rope(layer)
        if rope not in self._angles:
            cos, sin = self.model.angles(rope, self.positions)
            self._angles[rope] = cos[:, None].to(self.model.dtype), sin[:, None].to(self.model.dtype)
        return self._angles[rope]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write the rows' keys and values [N, kv_heads, head_dim] and attend: [N, heads, head_dim] -> [N, hidden]."""
        parts = []
        for number, (segment, first, last) in enumerate(self.spans):
            own_keys, own_values = keys[first:last], values[first:last]
            if segment.cache is None:
                seen_keys, seen_values = own_keys.transpose(0, 1), own_values.transpose(0, 1)
            else:
                segment.cache.write(layer, own_keys, own_values)
                seen_keys, seen_values = segment.cache.view(layer)
            own, config = queries[first:last], self.model.config
            if segment.cache is not None and (segment.cache.policy is not None or segment.steered):
                own = own * config.attention_scale
                part = attend_by_policy(own, seen_keys, seen_values, segment, layer, config.window(layer))
            else:
                part = attend(own, seen_keys, seen_values, self.mask(number, layer), config.attention_scale)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mix(self, mixer: Recurrence, projected: torch.Tensor) -> torch.Tensor:
        """What a recurrent layer finds, row by row of every segment."""
        parts = [
            mixer(projected[first:last], segment, self.line(number))
            for number, (segment, first, last) in enumerate(self.spans)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def line(self, number: int) -> torch.Tensor | None:
        """The tentative row right before each of a segment, None where they follow each other."""
        if number not in self._lines:
            segment = self.spans[number][0]
            follow = segment.mask is None and not segment.stays
            self._lines[number] = None if follow else parents(_to_device(segment.seen(), self.model.device))
        return self._lines[number]

    def convolve(self, convolution: ShortConvolution, normed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of every segment behind a layer's convolution."""
        parts = [convolution(projected[first:last], normed[first:last], segment) for segment, first, last in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mask(self, number: int, layer: int) -> torch.Tensor | None:
        segment = self.spans[number][0]
        window = self.model.config.window(layer)
        # Layers differ only in their window, unless eviction left them with different slots.
        evicted = segment.cache is not None and segment.cache.evicted
        key = (number, window is not None, layer if evicted else -1)
        if key not in self._masks:
            seen = visibility(segment, layer, window)
            self._masks[key] = None if seen is None else _to_device(seen, self.model.device)
        return self._masks[key]


def _open_caches(batch: Batch, config: ModelConfig, layers: Sequence[int] | None) -> None:
    """Make room in every cache; give rows of a model that is not causal sight of those that they see there."""
    for number, segment in enumerate(batch.segments):
        if not config.causal and segment.mask is None:
            batch.segments[number] = segment = dataclasses.replace(segment, mask=_sight(segment, config.block_length))
        if segment.cache is not None:
            segment.cache.reserve(segment.positions, segment.stays, layers)
        elif segment.stays:
            raise ValueError("rows can stay only in a cache, and this segment has none")


def _sight(segment: Segment, block_length: int | None) -> np.ndarray:
    """Which tentative rows each row sees in a model that is not causal: all, or those of no later block."""
    if block_length is None:
        return np.ones((len(segment), segment.stays + len(segment)), dtype=bool)
    places = segment.positions
    if segment.cache is not None and segment.stays:
        start = int(segment.cache.lengths[0])
        places = np.concatenate((segment.cache.positions[0, start : start + segment.stays], places))
    seen: np.ndarray = places[None, :] // block_length <= segment.positions[:, None] // block_length
    return seen


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    # A blocking copy would wait until the device has done all that was asked of it so far.
    return torch.as_tensor(array).to(device, non_blocking=True)
