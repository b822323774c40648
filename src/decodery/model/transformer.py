"""One lean decoder-only transformer for the Llama, Mistral, Qwen2, Qwen3, SmolLM and Gemma 3 families."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import gelu, rms_norm, silu

from . import native
from .artifact import digest
from .attention import attend, rotate, visibility
from .batch import Batch, Scores, Segment, tapped_layers
from .cache import KVCache
from .config import ModelConfig, Rope
from .graphs import StaticPasses, StaticStep
from .int8 import Int8Linear
from .native import Int8Stack
from .portable import PortableStack
from .rope import rope_table
from .threads import one_thread
from .weights import Layer, Weights


class Transformer:
    """Runs `Weights` as `ModelConfig` describes them. `embed`, `layers` and `head` can be called apart.

    Rows of all segments share the linear layers; attention works per segment, over its cache and its own rows.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.norm.dtype
        self.device = weights.norm.device
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stack: Int8Stack | PortableStack | None = None
        if isinstance(weights.head, Int8Linear) and self.device.type == "cpu":
            stack = PortableStack if native.library() is None else Int8Stack
            self._stack = stack(config, weights, self.angles)
        self.static: StaticPasses | None = None
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            self.static = StaticPasses(budget=free // 4)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def exact_rows(self) -> bool:
        """Whether a row's result is the same, bit for bit, whatever other rows share the pass."""
        return self._stack is not None

    @cached_property
    def fingerprint(self) -> str:
        """See `artifact.fingerprint`."""
        norms = [norm for layer in self.weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        return digest(self.weights.embedding, *norms, self.weights.norm)

    def new_cache(self) -> KVCache:
        config = self.config
        return KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=self.dtype, device=self.device)

    def forward(self, batch: Batch, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None) -> Scores:
        """See `LanguageModel.forward`. Small passes run at fixed shapes where `static` is set, as it is on a GPU."""
        if self.static is not None and layers is None:
            scores = self.static.forward(self, batch, taps)
            if scores is not None:
                return scores
        if self._stack is not None:
            with one_thread():
                return self._pass(batch, taps, layers)
        return self._pass(batch, taps, layers)

    def _pass(self, batch: Batch, taps: Sequence[int], layers: Sequence[int] | None) -> Scores:
        where = tapped_layers(taps, self.config.num_layers, layers)
        hidden, states = self.layers(self.embed(batch), batch, layers, taps=list(where.values()))
        tapped = {tap: states[after] for tap, after in where.items()}
        rows, bounds = batch.logit_rows
        if not np.array_equal(rows, np.arange(batch.rows)):
            hidden = hidden[_to_device(rows, self.device)]
        return Scores(self.head(hidden), bounds, tapped, batch.offsets)

    def embed(self, batch: Batch) -> torch.Tensor:
        """[N, hidden] input embeddings of the rows; a segment's own embeddings are taken as they are."""
        parts = []
        for segment in batch.segments:
            if segment.embeddings is not None:
                parts.append(segment.embeddings.to(self.device, self.dtype))
            else:
                assert segment.tokens is not None
                parts.append(self.embed_tokens(_to_device(segment.tokens, self.device)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] ids -> [n, hidden], scaled as the family scales them."""
        if self.weights.kept is not None:
            tokens = self.weights.kept.rows[tokens]
        rows = self.weights.embedding[tokens].to(self.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def layers(
        self,
        hidden: torch.Tensor,
        batch: Batch,
        run: Sequence[int] | None = None,
        *,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the layers `run` (None: all) over [N, hidden]; returns the residual stream and the tapped states.

        taps are counted from the front here.
        """
        run = range(self.config.num_layers) if run is None else run
        _open_caches(batch, self.config.causal, run)
        if self._stack is not None:
            return self._stack.layers(hidden, batch, run, taps)
        return self.blocks(hidden, _Pass(self, batch), run, taps)

    def blocks(
        self, hidden: torch.Tensor, step: _Pass | StaticStep, run: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """`layers` with positions, caches and masks taken from `step`."""
        tapped = {0: hidden} if 0 in taps else {}
        for index in run:
            hidden = self._block(index, hidden, step)
            if index + 1 in taps:
                tapped[index + 1] = hidden
        return hidden, tapped

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection: [M, hidden] -> [M, vocab] logits, at least float32.

        Tokens that the model has no output for get -inf.
        """
        logits, kept = self.outputs(hidden), self.weights.kept
        if kept is None:
            return logits
        every = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return every.index_copy_(1, kept.ids, logits)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head`, of the tokens alone that have an output."""
        if self._stack is not None:
            return self._stack.head(hidden)
        return self.project(rms_norm(hidden, hidden.shape[-1:], self.weights.norm, self.config.norm_eps))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """The vocabulary projection alone: [M, hidden] -> [M, vocab] logits, at least float32."""
        logits = self.weights.head(hidden)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after the last layer, tapped -> as the vocabulary projection sees them."""
        return self._norm(hidden, self.weights.norm.to(hidden.dtype))

    def _block(self, index: int, hidden: torch.Tensor, step: _Pass | StaticStep) -> torch.Tensor:
        config, layer = self.config, self.weights.layers[index]
        branch = self._attention(index, layer, self._norm(hidden, layer.attention_norm), step)
        if config.sandwich_norms:
            branch = self._norm(branch, layer.post_attention_norm)
        hidden = hidden + branch
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        gate = silu(gate) if config.activation == "silu" else gelu(gate, approximate="tanh")
        branch = layer.down(gate * up)
        if config.sandwich_norms:
            branch = self._norm(branch, layer.post_mlp_norm)
        return hidden + branch

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(rows, rows.shape[-1:], weight, self.config.norm_eps)

    def _attention(self, index: int, layer: Layer, normed: torch.Tensor, step: _Pass | StaticStep) -> torch.Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        queries, keys, values = (
            layer.qkv(normed).view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        )
        if config.qk_norm:
            queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
        cos, sin = step.angles(index)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        return layer.output(step.attend(index, queries, keys, values))

    def angles(self, rope: Rope, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, head_dim / 2] float32 of the rows' positions."""
        needed = int(positions.max()) + 1
        table = self._tables.get(rope)
        if table is None or len(table[0]) < needed:
            # Tables grow by doubling: a model may allow 131,072 positions and see three hundred.
            size = min(max(1024, 2 * needed), max(needed, self.config.max_positions))
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
            scale = self.model.config.attention_scale
            parts.append(attend(queries[first:last], seen_keys, seen_values, self.mask(number, layer), scale))
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


def _open_caches(batch: Batch, causal: bool, run: Sequence[int]) -> None:
    """Make room in every cache; give rows of a bidirectional model sight of each other."""
    for number, segment in enumerate(batch.segments):
        if not causal and segment.mask is None:
            mask = np.ones((len(segment), segment.stays + len(segment)), dtype=bool)
            batch.segments[number] = segment = dataclasses.replace(segment, mask=mask)
        if segment.cache is not None:
            segment.cache.reserve(segment.positions, segment.stays, run)
        elif segment.stays:
            raise ValueError("rows can stay only in a cache, and this segment has none")


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    # A blocking copy would wait until the device has done all that was asked of it so far.
    return torch.as_tensor(array).to(device, non_blocking=True)
