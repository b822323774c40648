"""The tensors of a transformer, in the fused form the forward pass uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear

from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import Form

from ..native.block_linear import BlockLinear
from ..native.floats import Float4Linear, Float8Linear, MXFP4Linear, NF4Linear
from ..native.int4 import Int4Linear
from ..native.int8 import Int8Linear
from ..native.reordered import ReorderedLinear
from ..native.rounded_inputs import RoundedInputs
from ..native.super_blocks import SuperBlockLinear
from ..native.ternary import TernaryLinear


@dataclass
class Dense:
    """A linear layer in floating point.

    Attributes:
        weight: [out, in].
        bias: [out] or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows it reads."""
        return self.weight.dtype

    @property
    def form(self) -> Form:
        """What kernels call it, which take weights of 16 bits alone."""
        return Form.FLOAT16 if self.weight.dtype == torch.float16 else Form.BFLOAT16

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out], in the rows' dtype."""
        # Beside layers of integers, whose rows are float32, some weights have 16 bits.
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return linear(rows, self.weight.to(rows.dtype), bias)

    def some(self, outputs: torch.Tensor) -> Dense:
        """Only these outputs [k], in this order."""
        return Dense(self.weight[outputs], None if self.bias is None else self.bias[outputs])


QUANTIZED = (
    Int8Linear,
    Int4Linear,
    BlockLinear,
    SuperBlockLinear,
    TernaryLinear,
    Float4Linear,
    Float8Linear,
    MXFP4Linear,
    NF4Linear,
    ReorderedLinear,
)
"""Linear layers of fewer than 16 bits, which take rows in float32."""

Linear = Callable[[torch.Tensor], torch.Tensor]


def floating(linear: Linear) -> Dense:
    """A copy of a linear layer of any precision that can be changed, in float32 or float64.

    Raises:
        UnsupportedModel: For one that rounds what it reads, which no weights say.
    """
    if isinstance(linear, RoundedInputs):
        raise UnsupportedModel("this copy rounds what its layers read: change or train the model that it was made from")
    if isinstance(linear, Dense):
        return Dense(copied(linear.weight), None if linear.bias is None else copied(linear.bias))
    layer: Any = linear
    if not hasattr(layer, "dense"):
        raise UnsupportedModel("this is a part of a model that processes share: change or train the whole one")
    return Dense(layer.dense(), layer.bias)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be changed, in float32 or float64."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


@dataclass
class Layer:
    """One block.

    Norm weights are [hidden] (q_norm, k_norm: [head_dim]), ready to multiply; [2 hidden] with biases. Layers that keep
    latents (`config.Latent`): qkv is hidden -> queries, or what q_up makes queries of, and rank + turned. Layers with
    convolutions (`config.ShortConv`): short_in: [3 rank, hidden], of queries, keys and values. Where such a layer
    attends side by side with its state, qkv and output are attention's, and mix_in and mix_out the mixer's. Layers
    without an MLP have mlp_norm, gate_up and down of no rows.

    Attributes:
        qkv: Hidden -> (heads + 2 kv_heads) * head_dim, queries first, then keys, then values.
        gate_up: Hidden -> 2 * intermediate, gate first, or hidden -> intermediate where there is no gate.
        q_norm: [queries].
        k_norm: [rank].
        router: [experts, hidden] where the MLP is a mixture, else None; gate_up and down then hold those of all
            experts, one after the other.
        attention_shortcut, mlp_shortcut: [hidden, hidden], what the stream is multiplied by before the sublayer adds to
            it.
        conv: [channels, kernel].
        conv_bias: [channels]; step_bias, decay (the logarithm of -a) and skip: [heads].
        select_in, select_out: Of Mamba-1, [rank + 2 state, channels] what steps and what leads into states and out are
            made by, normed by select_norm [rank + 2 state], and [channels, rank]; decay is [channels, state].
        gate_norm: [inner], or of Gated DeltaNet [head_dim], None where nothing is normed.
        heads_up: [heads * (plain + value), rank].
        short_out: [rank * kernel, qkv's outputs].
        short_static: [kernel, qkv's outputs].
        operator: [heads, head_dim, head_dim] where `config.operators`, what each head's rotated queries are multiplied
            by. Recurrent layers (`config.Mamba`): qkv is hidden -> inner + channels + heads, output inner -> hidden.
        router_bias, choice_bias: [experts], see `ModelConfig`.
        steps: Of Gated DeltaNet, hidden -> how much is written and steps, 2 heads; qkv is hidden -> inner + channels.
        out_gate: Hidden -> heads * head_dim, what gates what attention finds, None where nothing does.
        shared_router: [1, hidden], how much of the MLP that all rows take a row adds.
        sinks: [heads] where `config.sinks`.
        shared_gate_up, shared_down: Of an MLP that all rows take beside their experts.
        experts_norm, post_shared_norm, post_experts_norm, router_scale: [hidden] where `config.experts_beside`, and
            expert_scales: [experts].
        laurel_in, laurel_out: Hidden -> rank -> hidden, whose norm is laurel_norm.
        stream_norm, stream_scale: [hidden] where `config.alternating`; stream_router: [streams, hidden];
            stream_predict: [streams * streams, streams]; stream_correct: [streams, streams].
        input_gate, input_out: Hidden -> layer_inputs -> hidden, whose norm is input_norm.
        scale: [1] what leaves the layer is multiplied by.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    router: torch.Tensor | None = None
    attention_shortcut: torch.Tensor | None = None
    mlp_shortcut: torch.Tensor | None = None
    conv: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    step_bias: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    select_in: torch.Tensor | None = None
    select_out: torch.Tensor | None = None
    select_norm: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    gate_norm: torch.Tensor | None = None
    mix_in: Linear | None = None
    mix_out: Linear | None = None
    q_up: Linear | None = None
    heads_up: torch.Tensor | None = None
    short_in: torch.Tensor | None = None
    short_out: torch.Tensor | None = None
    short_static: torch.Tensor | None = None
    operator: torch.Tensor | None = None
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    sinks: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    shared_router: torch.Tensor | None = None
    steps: Linear | None = None
    out_gate: Linear | None = None
    experts_norm: torch.Tensor | None = None
    post_shared_norm: torch.Tensor | None = None
    post_experts_norm: torch.Tensor | None = None
    router_scale: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None
    laurel_in: Linear | None = None
    laurel_out: Linear | None = None
    laurel_norm: torch.Tensor | None = None
    stream_norm: torch.Tensor | None = None
    stream_router: torch.Tensor | None = None
    stream_predict: torch.Tensor | None = None
    stream_correct: torch.Tensor | None = None
    stream_scale: torch.Tensor | None = None
    input_gate: Linear | None = None
    input_out: Linear | None = None
    input_norm: torch.Tensor | None = None
    scale: torch.Tensor | None = None


@dataclass
class TokenInputs:
    """What layers read of tokens beside the stream, and how other streams are made and merged.

    Attributes:
        table: [layer_tokens, layers * layer_inputs], whose rows are looked up.
        projection: Hidden -> layers * layer_inputs.
        norm: [layer_inputs].
        stream_in, stream_out: [(streams - 1) * hidden, hidden] where `config.alternating`.
    """

    table: Linear
    projection: Linear
    norm: torch.Tensor
    stream_in: Linear | None = None
    stream_out: Linear | None = None


@dataclass
class Use:
    """What one layer adds to the block it shares with others (`config.Shared`).

    Attributes:
        back: Hidden -> hidden, after the block.
        gate_up_in, gate_up_out: To the block's gate_up, hidden -> rank -> 2 inner.
        qkv_in: 2 hidden -> 3 rank, a rank each for q_out, k_out and v_out, or None where nothing is added there.
    """

    back: Linear
    gate_up_in: Linear
    gate_up_out: Linear
    qkv_in: Linear | None = None
    q_out: Linear | None = None
    k_out: Linear | None = None
    v_out: Linear | None = None


@dataclass
class Kept:
    """The tokens of a vocabulary that a small model has rows for.

    Attributes:
        ids: [k] int64, ascending, the tokens that have an embedding and an output of their own; the others are never
            predicted.
        rows: [vocab] int64, the embedding every token is read as: its own or that of a similar token.
    """

    ids: torch.Tensor
    rows: torch.Tensor


@dataclass
class Weights:
    """All of a model.

    norm is the last one, or that of the embeddings where `ModelConfig.joined_norms`.

    Attributes:
        embedding: [vocab, hidden].
        norm: [hidden].
        head: Hidden -> vocab.
        kept: None where every token has a row; otherwise embedding and head have `len(kept.ids)` rows in place of
            vocab.
        positions: [most, hidden].
        shared, uses: Blocks that layers share, whose attention_norm is [2 hidden] and qkv 2 hidden -> queries, keys and
            values, and what each of `ModelConfig.sharing` adds to its own.
        inputs: One where `ModelConfig.layer_inputs`, else none.
    """

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: Linear
    kept: Kept | None = None
    positions: torch.Tensor | None = None
    shared: list[Layer] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    inputs: list[TokenInputs] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that layers compute: the head's, at least float32 beside matrices of integers.

        Norms and other vectors may have more bits.
        """
        parts = (part for layer in self.layers for part in vars(layer).values())
        integers = any(isinstance(part, QUANTIZED) for part in (self.head, *parts))
        own: torch.dtype = getattr(self.head, "dtype", torch.float32)
        return torch.promote_types(own, torch.float32) if integers else own

    @property
    def tokens(self) -> int:
        """How many have an embedding."""
        return len(self.embedding)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., hidden] the embeddings of tokens [...]."""
        return self.embedding[tokens]


_HOLDING = ("layers", "shared", "uses", "inputs")


def holders(weights: Weights) -> Iterator[tuple[str, Layer | Use | TokenInputs]]:
    """All that holds tensors by name beside the weights themselves, each with what it is called."""
    for group in _HOLDING:
        yield from ((f"{group}.{number}", each) for number, each in enumerate(getattr(weights, group)))


def exchanged(weights: Weights, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Fields of weights in which `change` is applied to each part, or None."""

    def other(each: Layer | Use | TokenInputs) -> Layer | Use | TokenInputs:
        return type(each)(**{name: change(part) for name, part in vars(each).items()})

    return {group: [other(each) for each in getattr(weights, group)] for group in _HOLDING}
