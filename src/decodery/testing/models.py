"""Small models with known or cheap probabilities, for the checks of invariants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from decodery.core.noise import uniform
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan, attending, sublayers
from decodery.models.native.int8 import Int8Linear
from decodery.models.protocol import Capabilities, LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Linear, Weights


class Counted:
    """A model that records its passes.

    Attributes:
        rows: Number of rows of every pass, in order.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.rows = model, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        self.rows.append(batch.rows)
        return self.model.forward(batch, **settings)


class TableModel:
    """A language model whose logits are a seeded function of the last `order` tokens.

    Every distribution can be enumerated. A row's hidden state is its token. The cache stores token ids where a
    transformer stores keys, so that `keep`, `truncate` and `fork` are tested too. The model counts as one layer. Where
    the layer is skipped, or the head is applied to a hidden state, the logits depend only on the newest token.

    Args:
        vocab_size: Number of tokens.
        order: Number of last tokens on which the logits depend.
        seed: Seed of the logits.
        spread: Bound of the logits, which are uniform in [-spread, spread].
    """

    def __init__(self, vocab_size: int = 5, *, order: int = 2, seed: int = 0, spread: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self.order = order
        self.seed = seed
        self.spread = spread
        self.device = torch.device("cpu")
        self.dtype = torch.float64
        self.capabilities = Capabilities(
            exact_rows=True, states=True, layer_plans=True, parts=True, sites=frozenset(("residual",))
        )
        self.fingerprint = ""
        self._rows: dict[int, torch.Tensor] = {}
        self.config = ModelConfig(vocab_size, 1, 1, 1, 1, 1, 1, max_positions=4096, family="table")

    def new_cache(self) -> KVCache:
        return KVCache(1, 1, 1, dtype=torch.float64, capacity=16)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[vocab] float64 after these tokens."""
        key = 0
        for token in tokens[-self.order :]:
            key = key * (self.vocab_size + 1) + int(token) + 1
        if key not in self._rows:
            noise = uniform(self.seed, key, torch.arange(self.vocab_size, device="cpu"), stream=99)
            self._rows[key] = (2.0 * noise - 1.0) * self.spread
        return self._rows[key]

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        rows: list[torch.Tensor] = []
        for segment in batch.segments:
            rows += self._segment(segment, layer_plan)
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64, device="cpu")
        _, bounds = batch.logit_rows
        read = [torch.from_numpy(_tokens(segment)).double() for segment in batch.segments]
        hidden = {tap: torch.cat(read)[:, None] for tap in taps}
        return Scores(logits, bounds, hidden, batch.offsets)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] ids -> [n, 1]: an embedding is its token."""
        return tokens.double()[:, None]

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, 1] states, unchanged."""
        return hidden

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, 1] states -> [n, vocab] logits that depend only on these tokens."""
        return torch.stack([self.logits([token]) for token in normed[:, 0].round().long().tolist()])

    def projection(self, tokens: torch.Tensor | None) -> Linear:
        """`project`, onto some tokens."""
        return self.project if tokens is None else lambda normed: self.project(normed)[:, tokens]

    def _segment(self, segment: Segment, layer_plan: LayerPlan) -> list[torch.Tensor]:
        n, tokens, layers = len(segment), _tokens(segment), attending(layer_plan, 1)
        wanted = range(n) if segment.logit_rows is None else segment.logit_rows
        if sublayers(layer_plan, 1) < 2:
            if segment.cache is not None:
                segment.cache.reserve(segment.positions, segment.retained, layers)
            return [self.logits([tokens[row]]) for row in wanted]
        seen, past, tentative = segment.seen(), [], tokens
        if segment.cache is not None:
            segment.cache.reserve(segment.positions, segment.retained)
            ids = torch.from_numpy(tokens).double().view(n, 1, 1)
            segment.cache.write(0, ids, ids)
            held = segment.cache.view(0)[0].view(-1).long().numpy()
            past, tentative = held[: segment.cache.length].tolist(), held[segment.cache.length :]
        return [self.logits(past + tentative[seen[row]].tolist()) for row in wanted]


def _tokens(segment: Segment) -> np.ndarray:
    """[n] tokens that a segment's rows read."""
    if segment.states is None:
        return np.asarray(segment.tokens, dtype=np.int64)
    states = segment.states
    for intervention in segment.interventions:
        states = intervention.change(states, segment)
    return states[:, 0].round().long().numpy()


def tiny_transformer(
    seed: int = 0,
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float64,
    max_positions: int = 512,
) -> Transformer:
    """Make a randomly initialised Llama-style transformer with grouped heads and rotary positions.

    Args:
        seed: Seed of the weights.
        vocab_size: Number of tokens.
        hidden_size: Size of the hidden states.
        num_layers: Number of layers.
        dtype: Data type of the weights.
        max_positions: Length of the context, in tokens.
    """
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 4,
        max_positions=max_positions,
    )
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")
        return (values * gain / columns**0.5).to(dtype)

    ones = torch.ones(hidden_size, dtype=dtype, device="cpu")
    heads = config.num_heads + 2 * config.num_kv_heads
    layers = [
        Layer(
            attention_norm=ones,
            qkv=Dense(matrix(heads * config.head_dim, hidden_size, 2.0)),
            output=Dense(matrix(hidden_size, hidden_size)),
            mlp_norm=ones,
            gate_up=Dense(matrix(2 * config.intermediate_size, hidden_size)),
            down=Dense(matrix(hidden_size, config.intermediate_size)),
        )
        for _ in range(num_layers)
    ]
    embedding = matrix(vocab_size, hidden_size, hidden_size**0.5)
    return Transformer(config, Weights(embedding, layers, ones, Dense(matrix(vocab_size, hidden_size, 3.0))))


def to_int8(model: Transformer) -> Transformer:
    """The same model with int8 linear layers, whose bits do not depend on other rows of a pass."""

    def converted(linear: Linear) -> Int8Linear:
        assert isinstance(linear, Dense)
        return Int8Linear.quantize(linear.weight, linear.bias)

    def floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.float()

    old = model.weights
    layers = [
        replace(
            layer,
            qkv=converted(layer.qkv),
            output=converted(layer.output),
            gate_up=converted(layer.gate_up),
            down=converted(layer.down),
            attention_norm=layer.attention_norm.float(),
            mlp_norm=layer.mlp_norm.float(),
            q_norm=floats(layer.q_norm),
            k_norm=floats(layer.k_norm),
            post_attention_norm=floats(layer.post_attention_norm),
            post_mlp_norm=floats(layer.post_mlp_norm),
        )
        for layer in old.layers
    ]
    return Transformer(model.config, Weights(old.embedding.float(), layers, old.norm.float(), converted(old.head)))
