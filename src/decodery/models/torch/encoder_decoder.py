"""Models of two stacks: an encoder reads a source, and a decoder writes with that in view (T5, CodeT5+)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import gelu, relu, rms_norm, silu

from decodery.core.errors import SettingsError, UnsupportedModel

from ..batch import Batch, Cost, Scores, Segment
from ..cache.cache import KVCache
from ..cache.cross_memory import CrossMemory
from ..config import ModelConfig
from ..hooks import HookPoint, Hooks, Tap
from ..layer_plan import WHOLE, LayerPlan
from ..protocol import Capabilities
from ..trained.artifact import digest
from .attention import attend, visibility
from .weights import Dense

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda rows: gelu(rows, approximate="tanh"),
}


@dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    """Shape of both stacks; what `ModelConfig` says is the decoder's, and sizes are the same in both.

    Positions are told by distances alone, of which there are `buckets` kinds up to max_distance, and attention is not
    scaled.

    Attributes:
        gated: Whether MLPs multiply by a gate.
        scaled_head: Whether states are divided by the square root of the width before they are projected to the
            vocabulary.
        start_id: The token that every text begins with.
        block: None for an encoder whose tokens all see each other; else how many tokens of a source come at a time:
            they see each other and those before them, so that what is read stays as it is when more comes.
    """

    encoder_layers: int = 1
    buckets: int = 32
    max_distance: int = 128
    gated: bool = False
    scaled_head: bool = True
    start_id: int = 0
    block: int | None = None


@dataclass
class Cross:
    """How a layer of a decoder sees the source.

    Attributes:
        norm: [hidden].
        query: Hidden -> heads * head_dim.
        key_value: Twice.
    """

    norm: torch.Tensor
    query: Dense
    key_value: Dense
    output: Dense


@dataclass
class Block:
    """One layer of either stack.

    Attributes:
        qkv: Hidden -> 3 * heads * head_dim.
        up: Hidden -> intermediate, or gate and up.
        cross: None in an encoder.
    """

    attention_norm: torch.Tensor
    qkv: Dense
    output: Dense
    mlp_norm: torch.Tensor
    up: Dense
    down: Dense
    cross: Cross | None = None


@dataclass
class Stack:
    """The layers of an encoder or a decoder.

    Attributes:
        norm: After the last layer.
        distance: [buckets, heads], added to scores.
        ahead: Whether distances to later tokens have buckets of their own.
    """

    blocks: list[Block]
    norm: torch.Tensor
    distance: torch.Tensor
    ahead: bool


@dataclass
class EncoderDecoderWeights:
    """All of a model.

    Attributes:
        embedding: [vocab, hidden], of both stacks.
        head: Hidden -> vocab.
    """

    embedding: torch.Tensor
    encoder: Stack
    decoder: Stack
    head: Dense


class Rows(Protocol):
    """The rows of one pass, as every layer meets them."""

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of rows to each other and to earlier ones.

        [N, heads, head_dim] each -> [N, heads * head_dim].
        """
        ...

    def source(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """What they see of the source: [N, heads, head_dim] -> [N, heads * head_dim]."""
        ...


def run(stack: Stack, config: EncoderDecoderConfig, hidden: torch.Tensor, rows: Rows, hooks: Hooks) -> torch.Tensor:
    """All layers of a stack over [N, hidden], and the norm after them."""
    heads, dim = config.num_heads, config.head_dim
    hidden = hooks.enter(0, hidden)
    for index, block in enumerate(stack.blocks):
        normed = _norm(hidden, block.attention_norm, config)
        queries, keys, values = block.qkv(normed).view(-1, 3, heads, dim).unbind(1)
        hidden = hidden + block.output(rows.attend(index, queries, keys, values))
        if block.cross is not None:
            queries = block.cross.query(_norm(hidden, block.cross.norm, config)).view(-1, heads, dim)
            hidden = hidden + block.cross.output(rows.source(index, queries))
        inner = block.up(_norm(hidden, block.mlp_norm, config))
        activation = ACTIVATIONS[config.activation]
        if config.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = activation(gate) * inner
        else:
            inner = activation(inner)
        hidden = hooks.visit(HookPoint("residual", index + 1), hidden + block.down(inner))
    return _norm(hidden, stack.norm, config)


def distances(stack: Stack, config: EncoderDecoderConfig, rows: np.ndarray, slots: np.ndarray) -> torch.Tensor:
    """[heads, n, L] what is added to the scores of rows at positions [n] for slots at positions [L]."""
    apart = torch.from_numpy(slots[None, :].astype(np.int64) - rows[:, None])
    count, first = config.buckets, torch.zeros_like(apart)
    if stack.ahead:
        count //= 2
        first, apart = (apart > 0) * count, apart.abs()
    else:
        apart = (-apart).clamp(min=0)
    exact = count // 2
    # In float32, as those who trained such models did: a distance on the edge of two buckets falls into the same one.
    steps = torch.log(apart.float() / exact) / math.log(config.max_distance / exact) * (count - exact)
    far = (exact + steps.clamp(min=0).to(torch.int64)).clamp(max=count - 1)
    buckets = first + torch.where(apart < exact, apart, far)
    return stack.distance[buckets.to(stack.distance.device)].permute(2, 0, 1)


class SegmentRows:
    """Rows of the segments of a batch, each with its cache."""

    def __init__(self, stack: Stack, config: EncoderDecoderConfig, batch: Batch) -> None:
        self.stack, self.config, self.batch = stack, config, batch
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        for segment in batch.segments:
            if segment.cache is not None:
                segment.cache.reserve(segment.positions, segment.retained)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        parts = []
        for number, (segment, first) in enumerate(zip(self.batch.segments, self.batch.offsets, strict=False)):
            own = slice(first, first + len(segment))
            if segment.cache is None:
                seen = keys[own].transpose(0, 1), values[own].transpose(0, 1)
            else:
                segment.cache.write(layer, keys[own], values[own])
                seen = segment.cache.view(layer)
            parts.append(attend(queries[own], *seen, self._added(number, layer), 1.0))
        return torch.cat(parts)

    def source(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        parts = []
        for segment, first in zip(self.batch.segments, self.batch.offsets, strict=False):
            memory = None if segment.cache is None else segment.cache.memory
            if memory is None:
                raise SettingsError(
                    "this model writes with a source in view, and was given none: decode through `LLM`, whose prompts "
                    "are sources, or give the request source=Reads(tokens)"
                )
            keys, values = memory.data[layer]
            parts.append(attend(queries[first : first + len(segment)], keys, values, None, 1.0))
        return torch.cat(parts)

    def _added(self, number: int, layer: int) -> torch.Tensor:
        """What is added to scores: [heads, n, cached + retained + n]."""
        segment = self.batch.segments[number]
        cache = segment.cache
        key = number, layer if cache is not None and cache.evicted else -1
        if key not in self._seen:
            slots = segment.positions
            if cache is not None:
                slots = cache.positions[layer, : int(cache.lengths[layer]) + cache.tentative]
            added = distances(self.stack, self.config, segment.positions, slots)
            seen = visibility(segment, layer, None)
            if seen is not None:
                added = added.masked_fill(~torch.from_numpy(seen).to(added.device), -torch.inf)
            self._seen[key] = added.contiguous()
        return self._seen[key]


class Encoder:
    """Reads sources: rows of tokens to the states that decoders see. It has no logits."""

    def __init__(self, config: EncoderDecoderConfig, weights: EncoderDecoderWeights) -> None:
        # Its texts are sources: nothing of the decoder's but the sizes, and as many layers as it has itself.
        self.config = replace(config, num_layers=config.encoder_layers, sliding_layers=())
        self.weights = weights
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.vocab_size = config.vocab_size
        self.capabilities = Capabilities(gradients=True)
        self.fingerprint = ""

    def new_cache(self) -> KVCache:
        config = self.config
        return KVCache(config.num_layers, config.num_heads, config.head_dim, dtype=self.dtype, device=self.device)

    def segment(self, tokens: Sequence[int], cache: KVCache | None = None) -> Segment:
        """Tokens of a source, all of it or, of an encoder in blocks, whole blocks after what `cache` holds."""
        ids = np.asarray(tokens, dtype=np.int64)
        first = 0 if cache is None else cache.next_position
        positions = np.arange(first, first + len(ids))
        block = self.config.block
        if block is None:
            if first:
                raise SettingsError("this encoder reads a source as a whole: nothing can follow what it has read")
            mask = np.ones((len(ids), len(ids)), dtype=bool)
        else:
            if first % block:
                raise SettingsError(f"this encoder reads blocks of {block} tokens: only the last one may be shorter")
            mask = positions[:, None] // block >= positions[None, :] // block
        return Segment(positions, ids, mask=mask, cache=cache, logit_rows=[])

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`. The one tap is -1: the states that decoders see."""
        if layer_plan != WHOLE or any(tap != -1 for tap in taps) or len(batch.logit_rows[0]):
            raise UnsupportedModel("an encoder gives the states after its last layer, and no logits")
        ids = np.concatenate([np.asarray(segment.tokens, dtype=np.int64) for segment in batch.segments])
        hidden = self.weights.embedding[torch.from_numpy(ids).to(self.device)]
        stack = self.weights.encoder
        states = run(stack, self.config, hidden, SegmentRows(stack, self.config, batch), Hooks.reading(()))
        costs = [_cost(segment, self.config, self.dtype) for segment in batch.segments]
        none = states.new_empty((0, self.vocab_size))
        return Scores(none, batch.logit_rows[1], dict.fromkeys(taps, states), batch.offsets, costs)


class EncoderDecoder:
    """The decoder as a language model, whose texts have a source in view, and its `encoder`.

    A text's cache holds what it remembers of the source in `KVCache.memory`; `logits_sources.reads` puts it there.
    """

    def __init__(self, config: EncoderDecoderConfig, weights: EncoderDecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.encoder = Encoder(config, weights)
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.capabilities = Capabilities(sites=frozenset(("residual", "final_norm", "logits")), source=True)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        stacks = self.weights.encoder, self.weights.decoder
        return digest(self.weights.embedding, *(stack.norm for stack in stacks))

    def new_cache(self) -> KVCache:
        config = self.config
        return KVCache(config.num_layers, config.num_heads, config.head_dim, dtype=self.dtype, device=self.device)

    def memory_bytes(self, tokens: int) -> int:
        """Bytes of what it keeps of a source of so many tokens."""
        config, layers = self.config, sum(block.cross is not None for block in self.weights.decoder.blocks)
        return tokens * self.dtype.itemsize * (2 * layers * config.num_heads * config.head_dim + config.hidden_size)

    def remembered(self, states: torch.Tensor) -> CrossMemory:
        """What the decoder keeps of an encoder's states [m, hidden]."""
        shape = -1, 2, self.config.num_heads, self.config.head_dim
        parts = [
            block.cross.key_value(states).view(shape).permute(1, 2, 0, 3)
            for block in self.weights.decoder.blocks
            if block.cross is not None
        ]
        return CrossMemory(torch.stack(parts), states)

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`.

        Raises:
            SettingsError: For a text without a source.
        """
        if layer_plan != WHOLE:
            raise UnsupportedModel("a model of an encoder and a decoder always runs all of its layers")
        if any(segment.tokens is None for segment in batch.segments):
            raise UnsupportedModel("a model of an encoder and a decoder reads tokens, not embeddings")
        hooks = Hooks.of(batch, taps, layer_plan, self.config.num_layers)
        ids = np.concatenate([np.asarray(segment.tokens, dtype=np.int64) for segment in batch.segments])
        stack = self.weights.decoder
        hidden = self.weights.embedding[torch.from_numpy(ids).to(self.device)]
        hidden = run(stack, self.config, hidden, SegmentRows(stack, self.config, batch), hooks)
        rows, bounds = batch.logit_rows
        if len(rows) < batch.rows:
            hidden = hidden[torch.from_numpy(rows).to(self.device)]
        logits = hooks.visit(HookPoint("logits"), self.head(hooks.visit(HookPoint("final_norm"), hidden)))
        costs = [_cost(segment, self.config, self.dtype) for segment in batch.segments]
        return Scores(logits, bounds, hooks.tapped(), batch.offsets, costs)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """[M, hidden] states after the last norm -> [M, vocab] logits, at least float32."""
        scaled = normed * self.config.hidden_size**-0.5 if self.config.scaled_head else normed
        logits = self.weights.head(scaled)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _norm(rows: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return rms_norm(rows, rows.shape[-1:], weight, config.norm_eps)


def _cost(segment: Segment, config: ModelConfig, dtype: torch.dtype) -> Cost:
    return Cost.of(segment, WHOLE, config.num_layers, 2 * config.num_heads * config.head_dim * dtype.itemsize)
