"""The fused tensors of a model, and the parts of a checkpoint that each is stacked from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config import Mamba, ModelConfig, Selective, Shared

LINEARS = ("qkv", "output", "gate_up", "down")
MORE_LINEARS = (
    *("q_up", "shared_gate_up", "shared_down", "mix_in", "mix_out", "steps", "out_gate"),
    *("laurel_in", "laurel_out", "input_gate", "input_out"),
)
"""The parts of a layer that may be quantized, and those that only some families have."""
TABLES = ("embedding.weight", "inputs.0.table.weight")
"""Tensors whose rows are looked up."""


@dataclass(frozen=True)
class Slot:
    """One fused tensor: its parts are stacked along the first dimension.

    Attributes:
        linear: May be quantized.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    linear: bool = False


def slots(config: ModelConfig) -> Iterator[Slot]:
    """Every tensor of a model of this configuration, in the order of use."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tokens = config.kept_tokens or config.vocab_size
    yield Slot("embedding.weight", (tokens, hidden), ("embedding.weight",))
    if config.learned_positions:
        yield Slot("positions.weight", (config.max_positions, hidden), ("positions.weight",))
    whole_norm = (2 if config.centred_norms else 1) * hidden
    for index in range(config.num_layers):
        prefix, (kv_heads, dim) = f"layers.{index}.", config.head_shape(index)
        attention = config.num_heads * dim
        fused = attention + 2 * kv_heads * dim

        def norm(name: str, size: int, prefix: str = prefix) -> Slot:
            kinds = ("weight", "bias") if config.centred_norms else ("weight",)
            return Slot(f"{prefix}{name}.weight", (size,), tuple(f"{prefix}{name}.{kind}" for kind in kinds))

        def linear(
            name: str, shape: tuple[int, int], parts: tuple[str, ...], bias: bool, prefix: str = prefix
        ) -> Iterator[Slot]:
            names = [prefix + part for part in parts]
            yield Slot(f"{prefix}{name}.weight", shape, tuple(f"{part}.weight" for part in names), linear=True)
            if bias:
                yield Slot(f"{prefix}{name}.bias", shape[:1], tuple(f"{part}.bias" for part in names))

        if config.has_mixer(index):
            yield norm("attention_norm", whole_norm)
        if config.recurrent(index):
            yield from _mixer(config, prefix, ("mix_in", "mix_out") if config.beside(index) else ("qkv", "output"))
            if (delta := config.delta) is not None:
                yield from linear("qkv", (delta.inner + delta.channels, hidden), ("mix_gate", "mixed"), False)
                yield from linear("steps", (delta.steps, hidden), ("mix_written", "mix_steps"), False)
        if (latent := config.latent) is not None:
            size, kept = config.num_heads * (latent.plain + latent.turned), latent.rank + latent.turned
            first = "q_down" if latent.queries else "q"
            yield from linear("qkv", ((latent.queries or size) + kept, hidden), (first, "kv"), False)
            if latent.queries:
                yield norm("q_norm", latent.queries)
                yield from linear("q_up", (size, latent.queries), ("q_up",), False)
            yield norm("k_norm", latent.rank)
            shape = (config.num_heads * (latent.plain + latent.value), latent.rank)
            yield Slot(f"{prefix}heads_up.weight", shape, (f"{prefix}heads_up.weight",))
            yield from linear("output", (hidden, config.num_heads * latent.value), ("output",), False)
        elif config.convolves(index):
            yield from linear("qkv", (3 * hidden, hidden), ("qkv",), False)
            yield from linear("output", (hidden, hidden), ("output",), False)
            yield Slot(f"{prefix}conv.weight", (hidden, config.gated_conv), (f"{prefix}conv.weight",))
        elif config.beside(index) or (config.has_mixer(index) and not config.recurrent(index)):
            if config.kv_layer(index) != index:
                yield from linear("qkv", (attention, hidden), ("q",), config.qkv_bias)
            else:
                same = config.keys_as_values and not config.sliding_layers[index]
                yield from linear("qkv", (fused, hidden), ("q", "k", "k" if same else "v"), config.qkv_bias)
            yield from linear("output", (hidden, attention), ("output",), config.output_bias)
            if config.gated_attention:
                yield from linear("out_gate", (attention, hidden), ("out_gate",), config.qkv_bias)
            if config.sinks:
                yield Slot(f"{prefix}sinks.weight", (config.num_heads,), (f"{prefix}sinks.weight",))
        if (short := config.short_conv) is not None:
            sizes = {
                "short_in": (3 * short.rank, hidden),
                "short_out": (short.rank * short.kernel, fused),
                "short_static": (short.kernel, fused),
            }
            for name, sides in sizes.items():
                yield Slot(f"{prefix}{name}.weight", sides, (f"{prefix}{name}.weight",))
        if config.operators:
            square = (config.num_heads, dim, dim)
            yield Slot(f"{prefix}operator.weight", square, (f"{prefix}operator.weight",))
        if config.qk_norm and config.attends(index):
            yield norm("q_norm", attention if config.wide_qk_norm else dim)
            if config.kv_layer(index) == index:
                yield norm("k_norm", kv_heads * dim if config.wide_qk_norm else dim)
        if config.has_mlp(index):
            yield norm("mlp_norm", whole_norm)
        if not config.has_mlp(index):
            pass
        elif config.mixes(index):
            each = [f"experts.{number}." for number in range(config.experts)]
            halves = ("gate", "up") if config.gated else ("up",)
            both = tuple(part + half for part in each for half in halves)
            yield Slot(f"{prefix}router.weight", (config.experts, hidden), (f"{prefix}router.weight",))
            for name, there in (("router_bias", config.router_bias), ("choice_bias", config.choice_bias)):
                if there:
                    yield Slot(f"{prefix}{name}.weight", (config.experts,), (f"{prefix}{name}.weight",))
            bias, downs = config.expert_bias, tuple(part + "down" for part in each)
            yield from linear("gate_up", (len(both) * inner, hidden), both, bias)
            yield from linear("down", (config.experts * hidden, inner), downs, bias)
            if config.shared_gate:
                yield Slot(f"{prefix}shared_router.weight", (1, hidden), (f"{prefix}shared_router.weight",))
            if shared := config.shared_inner:
                own_halves = tuple(f"shared_{half}" for half in halves)
                yield from linear("shared_gate_up", (len(halves) * shared, hidden), own_halves, False)
                yield from linear("shared_down", (hidden, shared), ("shared_down",), False)
        else:
            own = config.inner(index)
            halves = ("gate", "up") if config.gated else ("up",)
            yield from linear("gate_up", (len(halves) * own, hidden), halves, config.mlp_bias)
            yield from linear("down", (hidden, own), ("down",), config.mlp_bias)
        if config.sandwich_norms:
            yield norm("post_attention_norm", hidden)
            yield norm("post_mlp_norm", hidden)
        for name, own_shape, quantized in _own_parts(config):
            yield Slot(f"{prefix}{name}.weight", own_shape, (f"{prefix}{name}.weight",), linear=quantized)
        for name in ("attention_shortcut", "mlp_shortcut") if config.shortcuts else ():
            yield Slot(f"{prefix}{name}.weight", (hidden, hidden), (f"{prefix}{name}.weight",))
    if config.shared is not None:
        yield from _blocks(config, config.shared)
    if config.layer_inputs:
        yield from _token_inputs(config)
    yield Slot("norm.weight", (whole_norm,), ("norm.weight", "norm.bias")[: 1 + config.centred_norms])
    source = "embedding.weight" if config.tie_embeddings else "head.weight"
    yield Slot("head.weight", (tokens, hidden), (source,), linear=True)
    if config.head_bias:
        yield Slot("head.bias", (tokens,), ("head.bias",))


def _own_parts(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """What layers of Gemma 3n and 4 have beside attention and MLP: names, shapes and whether they may be quantized."""
    hidden, inputs = config.hidden_size, config.layer_inputs
    if config.experts_beside:
        norms = ("experts_norm", "post_shared_norm", "post_experts_norm", "router_scale")
        yield from ((name, (hidden,), False) for name in norms)
        yield "expert_scales", (config.experts,), False
    if (own := config.alternating) is not None:
        yield "laurel_in", (own.rank, hidden), True
        yield "laurel_out", (hidden, own.rank), True
        yield from ((name, (hidden,), False) for name in ("laurel_norm", "stream_norm", "stream_scale"))
        yield "stream_router", (own.streams, hidden), False
        yield "stream_predict", (own.streams**2, own.streams), False
        yield "stream_correct", (own.streams, own.streams), False
    if inputs:
        yield "input_gate", (inputs, hidden), True
        yield "input_out", (hidden, inputs), True
        yield "input_norm", (hidden,), False
    if config.layer_scales:
        yield "scale", (1,), False


def _token_inputs(config: ModelConfig) -> Iterator[Slot]:
    """The tensors of `TokenInputs`."""
    hidden, width = config.hidden_size, config.num_layers * config.layer_inputs
    yield Slot("inputs.0.table.weight", (config.layer_tokens, width), ("token_inputs.weight",))
    yield Slot("inputs.0.projection.weight", (width, hidden), ("input_projection.weight",), linear=True)
    yield Slot("inputs.0.norm.weight", (config.layer_inputs,), ("input_norm.weight",))
    for name in ("stream_in", "stream_out") if config.alternating is not None else ():
        assert config.alternating is not None
        others = range(config.alternating.streams - 1)
        yield _matrix(f"inputs.0.{name}", (len(others) * hidden, hidden), [f"{name}_{number}" for number in others])


def _mixer(config: ModelConfig, prefix: str, names: tuple[str, str]) -> Iterator[Slot]:
    """The tensors between the norms of a recurrent layer. names: of its two linear layers."""
    shape = config.states
    assert shape is not None
    sizes: dict[str, tuple[int, ...]] = {
        names[1]: (config.hidden_size, shape.inner),
        "conv": (shape.channels, shape.kernel),
        **dict.fromkeys(("step_bias", "decay"), (shape.heads,)),
    }
    if isinstance(shape, Mamba):
        sizes |= {names[0]: (shape.inner + shape.width, config.hidden_size), "skip": (shape.heads,)}
        sizes |= {"conv_bias": (shape.channels,)} | ({"gate_norm": (shape.inner,)} if shape.normed else {})
    elif isinstance(shape, Selective):
        led = shape.rank + 2 * shape.state
        sizes |= {names[0]: (2 * shape.inner, config.hidden_size), "skip": (shape.heads,), "conv_bias": (shape.inner,)}
        sizes |= {"decay": (shape.heads, shape.state), "select_in": (led, shape.inner)}
        sizes["select_out"] = (shape.inner, shape.rank)
        if shape.weighted:
            parts = tuple(f"{prefix}{part}_norm.weight" for part in ("dt", "b", "c"))
            yield Slot(f"{prefix}select_norm.weight", (led,), parts)
    else:
        sizes["gate_norm"] = (shape.head_dim,)
    for name, size in sizes.items():
        yield Slot(f"{prefix}{name}.weight", size, (f"{prefix}{name}.weight",), linear=name in names)


def _blocks(config: ModelConfig, shared: Shared) -> Iterator[Slot]:
    """The tensors of blocks that layers share, and of what each layer adds to its own."""
    hidden, both = config.hidden_size, 2 * config.hidden_size
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for block in range(shared.blocks):
        prefix = f"shared.{block}."
        for name, size in (("attention_norm", both), ("mlp_norm", hidden)):
            yield Slot(f"{prefix}{name}.weight", (size,), (f"{prefix}{name}.weight",))
        yield _matrix(f"{prefix}qkv", (heads + 2 * keys, both), [prefix + part for part in "qkv"])
        yield _matrix(f"{prefix}output", (hidden, heads))
        yield _matrix(f"{prefix}gate_up", (2 * shared.inner, hidden))
        yield _matrix(f"{prefix}down", (hidden, shared.inner))
    for use in range(len(config.sharing)):
        prefix = f"uses.{use}."
        yield _matrix(f"{prefix}back", (hidden, hidden))
        yield _matrix(f"{prefix}gate_up_in", (shared.rank, hidden))
        yield _matrix(f"{prefix}gate_up_out", (2 * shared.inner, shared.rank))
        if shared.attention:
            yield _matrix(f"{prefix}qkv_in", (3 * shared.rank, both), [f"{prefix}{part}_in" for part in "qkv"])
            for part, size in (("q", heads), ("k", keys), ("v", keys)):
                yield _matrix(f"{prefix}{part}_out", (size, shared.rank))


def _matrix(name: str, shape: tuple[int, int], parts: Sequence[str] = ()) -> Slot:
    return Slot(f"{name}.weight", shape, tuple(f"{part}.weight" for part in parts or (name,)), linear=True)
