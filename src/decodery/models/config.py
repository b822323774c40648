"""What a decoder-only transformer looks like: one configuration for all families."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from .loaders.fields import Number, Whole

# Far beyond any model, and small enough that nothing computed from them overflows.
MOST_LAYERS = 4096
MOST_STREAMS = 8
LAYERS, HEADS, HEAD_DIM = Whole(1, MOST_LAYERS), Whole(1, 1 << 14), Whole(1, 1 << 14)
TOKENS, WIDTH, POSITIONS = Whole(1, 1 << 24), Whole(1, 1 << 20), Whole(1, 2**31 - 1)
TOKEN_ID = Whole(-1, 2**31 - 1)
EXPERTS = Whole(0, 1 << 12)
CLAMPED = "clamped"
"""The activation of gpt-oss: a gate that is clamped, and one more than the clamped value it opens."""
KERNEL = Whole(1, 64)
EPS, SCALE = Number(1e-20, 1.0), Number(1e-6, 1e6)
THETA, FACTOR = Number(1.001, 1e18), Number(2.0**-10, 2.0**20)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency and, optionally, how it is stretched for long contexts.

    Attributes:
        kind: "default", "none" (nothing is turned), "linear" (positions divided by `factor`), "llama3" (low frequencies
            divided by `factor`, a smooth band between), "yarn" (YaRN: Efficient Context Window Extension of Large
            Language Models, 2023) or "factors" (each frequency divided by its own of `factors`, one for each pair that
            is turned, as LongRoPE does and GGUF files of Llama 3 store it) or "proportional" (the first `share` of the
            pairs are turned, at the frequencies that they have where all are).
        attention_factor: What cosines and sines are multiplied by, for "yarn" and "factors"; None: what "yarn" takes
            for its factor, 1 for "factors".
        rotated: How many dimensions of a head are turned, an even number; 0 for all of them.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    rotated: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class States:
    """Layers of `heads` states of head_dim * state numbers, each driven by one of `groups`.

    Attributes:
        kernel: How many rows the convolution before them reaches over, itself included.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution goes over: the rows and what leads them into the states and out again."""
        return self.inner + 2 * self.groups * self.state

    @property
    def steps(self) -> int:
        """Numbers that steps are made of."""
        return self.heads

    @property
    def width(self) -> int:
        """Numbers that are kept of a row."""
        return self.channels + self.steps

    def spans(self, kv_heads: int, head_dim: int) -> int:
        """How many layers of a cache it takes to keep them."""
        return -(-self.width // (2 * kv_heads * head_dim))


@dataclass(frozen=True)
class Mamba(States):
    """Mamba-2 layers (Transformers are SSMs, 2024), whose states are [head_dim, state].

    Attributes:
        least_step, most_step: Bounds of steps.
        normed: Whether what a row says is normed after its gate.
    """

    least_step: float = 0.0
    most_step: float = 1e30
    normed: bool = True


@dataclass(frozen=True)
class Selective(States):
    """Mamba-1 layers (2023): channels are heads of one number; steps come of rows after the convolution.

    Attributes:
        rank: Of the matrices that make steps.
        step_eps: Of the norms of what makes steps and leads into states and out, None where they are not normed.
        weighted: Whether these norms have weights.
    """

    rank: int = 1
    step_eps: float | None = None
    weighted: bool = False

    @property
    def channels(self) -> int:
        """The rows alone."""
        return self.inner

    @property
    def steps(self) -> int:
        """None: they are made anew of what is kept."""
        return 0


@dataclass(frozen=True)
class GatedDelta(States):
    """Gated DeltaNet layers (Gated Delta Networks, 2024): `heads` of values, `groups` of queries and keys.

    States are [state, head_dim], from keys of `state` numbers to values of head_dim.

    Attributes:
        in_turns: Groups take turns from head to head; else the heads of a group follow each other.
    """

    in_turns: bool = False

    @property
    def steps(self) -> int:
        """How much is written, and steps."""
        return 2 * self.heads


@dataclass(frozen=True)
class Shared:
    """Blocks of attention and MLP that some recurrent layers share in turns (see `shared_blocks`).

    Attributes:
        blocks: How many there are.
        inner: Inner units of their MLPs.
        rank: Of what each layer adds to their matrices, those of MLPs, and with `attention` those of queries, keys and
            values too.
    """

    blocks: int
    inner: int
    rank: int
    attention: bool = False


@dataclass(frozen=True)
class ShortConv:
    """Convolutions of `kernel` rows on queries, keys and values; filters have `rank` (`short_conv`)."""

    kernel: int = 4
    rank: int = 15

    def spans(self, heads: int, kv_heads: int) -> int:
        """How many layers of a cache it takes to keep a layer's queries, keys and values."""
        return -(-(heads + 2 * kv_heads) // (2 * kv_heads))


@dataclass(frozen=True)
class Latent:
    """Attention over latents (see `latent`): a row keeps `rank` numbers and `turned` rotated ones.

    Attributes:
        plain: Numbers of a head's query that meet the latent, beside those that are turned.
        value: Of what a head finds.
        queries: Of how many numbers queries are made, 0 where they are made of the row itself.
        paired: Checkpoints have rotated neighbours side by side.
    """

    rank: int
    turned: int
    plain: int
    value: int
    queries: int = 0
    paired: bool = True


@dataclass(frozen=True)
class Alternating:
    """Streams of which each layer changes one and predicts the others (Alternating Updates, 2023).

    Attributes:
        streams: How many there are.
        active: Which one layers read.
        rank: Of what a layer adds beside attention (LAuReL, 2024).
        scaled: Whether weights multiply the active stream before it meets the layer's input of the token.
    """

    streams: int
    active: int
    rank: int
    scaled: bool = True


@dataclass(frozen=True)
class Temperature:
    """Queries are multiplied by 1 + scale * log(1 + floor((position + offset) / length)).

    Attributes:
        unturned: Whether this holds for layers without rotation alone.
    """

    scale: float
    length: int
    offset: int = 0
    unturned: bool = False

    def at(self, positions: np.ndarray) -> np.ndarray:
        """[n] float32, what queries at positions [n] are multiplied by."""
        grown = 1.0 + self.scale * np.log1p((positions + self.offset) // self.length)
        return np.asarray(grown, dtype=np.float32)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of a decoder-only transformer.

    Sizes are counts; `attention_scale` multiplies query-key products; `embedding_scale` multiplies embeddings.
    `sliding_layers[i]` says whether layer i sees only the last `sliding_window` positions (itself included), or where
    it is `chunked`, those since the last multiple of it. Norm weights are stored ready to multiply (families that store
    w - 1 are converted at loading).

    Attributes:
        intermediate_size: 0 where layers have no MLP.
        local_rope: The rotation of the layers that are marked in local_rope_layers, or of the sliding ones where that
            is ().
        attention_cap, logit_cap: Products of queries and keys, and logits, go through cap * tanh(x / cap); 0: as they
            are.
        residual_scale: What a sublayer's result is multiplied by before it is added to the stream.
        norms_after_rope: Queries and keys are normed after they are turned.
        unit_norms: Queries and keys of layers that turn them are normed without weights.
        temperature: How queries grow with their position, None: they do not.
        sinks: Every head has a score of its own that takes part in the softmax of attention and has no value.
        head_bias: Logits have biases.
        causal: Whether a row sees those before it alone. Where it is not, rows see all of each other, or with
            block_length those of their own block of so many positions and of the blocks before it.
        mask_id: The token that stands for what is not written yet, in masked diffusion models.
        shifted: Their row of a token predicts the token after it.
        kept_tokens: How many tokens have an embedding and an output of their own, as in small draft models; 0 is all of
            them.
        shortcuts: Whether layers turn the residual stream before they add to it, as sliced models do.
        vocabulary: Fingerprint of the tokenizer, "" where it is not known.
        exits: Numbers of layers after which norm and head were trained to make sense, all layers included; () if
            untrained.
        experts: How many MLPs a layer has of which each row takes experts_per_token, 0 for one that all rows take; each
            has `intermediate_size` inner units.
        normed_experts: Whether the weights of those taken sum to 1.
        summed_experts: They have no weights and are added up, as the parts of one MLP are.
        centred_norms: Norms take the mean away too and add a bias; their weights are stored with the biases after them.
        norms_after: A layer's two norms are those of what its sublayers found, which read the stream as it is.
        parallel: The MLP reads what attention reads.
        gated: MLPs have a gate.
        wide_qk_norm: Queries and keys are normed over all heads at once.
        learned_positions: Every position has an embedding that is added to the token's.
        joined_norms: A layer's two norms are those of the stream with what its sublayers found, and the last one is
            that of embeddings.
        mamba, selective, delta: The layers that are marked in state_layers keep states in place of keys and values.
        attending_layers: Which recurrent layers attend as well, () for none: side by side with their state, or where
            there are `shared` blocks, in one of these.
        latent: What attention keeps in place of keys and values, of which there is one head.
        short_conv: Convolutions on queries, keys and values of every layer, None for none.
        gated_attention: What attention finds is multiplied by the sigmoid of a gate of its own.
        mixing_layers, mlp_layers: Which layers attend or keep a state, and which have an MLP; () for all.
        gated_conv: Rows that a convolution between two gates reaches over, the row itself included, which layers that
            are marked in conv_layers have in place of attention; 0: none have.
        operators: Rotated queries are multiplied by a matrix per head before they meet keys (see `power_law`).
        sigmoid_router: The router says of each expert by itself how likely it is, not of all together.
        router_bias, choice_bias: What the router says has biases, or what chooses experts alone.
        expert_groups, taken_groups: Experts are in so many groups, and chosen from the best ones alone; 0: from all.
        group_best: A group is as good as the sum of so many of its best experts.
        scaled_inputs: Weights of experts multiply what experts read, not what they make of it.
        shared_gate: How much of the MLP that all rows take is added, each row says itself.
        expert_bias: Experts have biases.
        experts_scale: What weights of experts are multiplied by.
        shared_inner: Inner units of an MLP that all rows take beside their experts, 0 for none.
        dense_layers: Which layers have one MLP of dense_inner inner units in place of experts, () for none.
        experts_floor: Of every layer, the share of the most likely expert's weight below which a row does without
            another one, () where none goes without.
        experts_beside: Experts read norms of their own beside the MLP that all rows take, and are normed before the two
            are added up; `router_scale` and `expert_scales` are weights.
        head_shapes: Key-value heads of every layer and their width, () where all are alike; then `num_kv_heads` rows of
            `head_dim` numbers are what a cache holds of a token, and the narrower layers leave some unused.
        reused_layers: How many of the last layers read the keys and values of the last layer of their kind before them.
        unit_values: Values are normed without weights.
        keys_as_values: Layers without a window make their values by the matrix of their keys.
        inners: Inner units of every layer's MLP, () for `intermediate_size`.
        sparsity: Of every layer, the share of gates that are shut before the activation, by their mean and spread; ()
            where none are.
        layer_inputs: Width of what every layer reads of the token itself, 0 for nothing.
        layer_tokens: Tokens that have such inputs; the others have those of token 0.
        layer_scales: What leaves a layer is multiplied by a weight.
        alternating: Streams beside the one that layers read, None for none.
        image_tokens: Tokens in whose places images are read otherwise than this package reads embeddings.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    family: str = "llama"
    norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None
    local_rope_layers: tuple[bool, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    causal: bool = True
    block_length: int | None = None
    mask_id: int | None = None
    shifted: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    kept_tokens: int = 0
    shortcuts: bool = False
    vocabulary: str = ""
    exits: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    normed_experts: bool = True
    summed_experts: bool = False
    centred_norms: bool = False
    norms_after: bool = False
    parallel: bool = False
    gated: bool = True
    wide_qk_norm: bool = False
    learned_positions: bool = False
    joined_norms: bool = False
    mamba: Mamba | None = None
    selective: Selective | None = None
    delta: GatedDelta | None = None
    state_layers: tuple[bool, ...] = ()
    attending_layers: tuple[bool, ...] = ()
    shared: Shared | None = None
    latent: Latent | None = None
    short_conv: ShortConv | None = None
    gated_conv: int = 0
    conv_layers: tuple[bool, ...] = ()
    operators: bool = False
    experts_scale: float = 1.0
    shared_inner: int = 0
    dense_layers: tuple[bool, ...] = ()
    dense_inner: int = 0
    experts_floor: tuple[float, ...] = ()
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    residual_scale: float = 1.0
    norms_after_rope: bool = False
    unit_norms: bool = False
    temperature: Temperature | None = None
    chunked: bool = False
    sigmoid_router: bool = False
    router_bias: bool = False
    choice_bias: bool = False
    expert_groups: int = 0
    taken_groups: int = 0
    group_best: int = 2
    scaled_inputs: bool = False
    shared_gate: bool = False
    expert_bias: bool = False
    sinks: bool = False
    head_bias: bool = False
    gated_attention: bool = False
    mixing_layers: tuple[bool, ...] = ()
    mlp_layers: tuple[bool, ...] = ()
    experts_beside: bool = False
    head_shapes: tuple[tuple[int, int], ...] = ()
    reused_layers: int = 0
    unit_values: bool = False
    keys_as_values: bool = False
    inners: tuple[int, ...] = ()
    sparsity: tuple[float, ...] = ()
    layer_inputs: int = 0
    layer_tokens: int = 0
    layer_scales: bool = False
    alternating: Alternating | None = None
    image_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        if not self.sliding_layers:
            object.__setattr__(self, "sliding_layers", (False,) * self.num_layers)

    @property
    def usual(self) -> bool:
        """Whether its blocks are Llama's up to sizes, biases, added norms and experts.

        Draft heads and transformed copies have such blocks.
        """
        others = self.norms_after or self.wide_qk_norm or self.residual_scale != 1.0 or self.norms_after_rope
        others = others or self.unusual_softmax or self.logit_cap != 0.0 or self.chunked or self.scaled_inputs
        others = others or self.keeps_order or self.gated_attention or self.latent is not None or self.unit_values
        others = others or not self.gated
        return self.native and not others and self.temperature is None and not self.unit_norms

    @property
    def native(self) -> bool:
        """Whether native kernels run its blocks."""
        others = self.centred_norms or self.parallel or self.learned_positions or self.operators
        others = others or self.joined_norms or self.head_bias
        others = others or self.short_conv is not None or self.shared is not None
        others = others or (any(self.sparsity) and not self.alternating) or not self._heads_fit
        opening = ("silu", "gelu_tanh", CLAMPED) if self.experts else ("silu", "gelu_tanh")
        return not others and self.activation in (opening if self.gated else ("relu2",))

    @property
    def _heads_fit(self) -> bool:
        """Whether heads of all layers lie in rows of a cache as kernels read them: side by side, whole."""
        dims = {
            rope: {dim for layer, (_, dim) in enumerate(self.head_shapes) if self.layer_rope(layer) == rope}
            for rope in (self.rope, self.local_rope)
        }
        return all(dim % 16 == 0 and self.head_dim % dim == 0 for _, dim in self.head_shapes) and all(
            len(each) <= 1 for each in dims.values()
        )

    @property
    def portable(self) -> bool:
        """Whether its passes in int8 and int4 can be run in the kernels' order of sums, exact to the bit."""
        others = self.keeps_order or self.latent or self.joined_norms or self.operators or self.gated_attention
        return not (others or self.mixing_layers or self.mlp_layers or self.unit_values)

    @property
    def static_shapes(self) -> bool:
        """Whether its passes can run at fixed shapes, as on a GPU."""
        # What is done to embeddings before the first layer has no fixed shape.
        before = self.learned_positions or self.joined_norms
        return not (self.experts or before or self.keeps_order or self.unit_values)

    @property
    def unusual_softmax(self) -> bool:
        """Whether scores of attention are more than products, or are not all of them those of keys."""
        return self.attention_cap != 0.0 or self.sinks

    @property
    def cache_layers(self) -> int:
        """How many layers of slots a text takes."""
        if self.short_conv is not None:
            return self.num_layers * (1 + self.short_conv.spans(self.num_heads, self.num_kv_heads))
        if self.states is None:
            return self.num_layers - self.reused_layers + sum(self.conv_layers) * (self.conv_spans - 1)
        more = sum(self.state_layers) * (self.states.spans(self.num_kv_heads, self.head_dim) - 1)
        return self.num_layers + more + sum(self.attending_layers)

    @property
    def keeps_order(self) -> bool:
        """Whether some layer reads its rows one after the other, so that none can see a later one."""
        return self.states is not None or self.short_conv is not None or self.gated_conv > 0

    @property
    def states(self) -> Mamba | Selective | GatedDelta | None:
        """What its recurrent layers keep."""
        return self.mamba or self.selective or self.delta

    def convolves(self, layer: int) -> bool:
        """Whether a layer has a convolution between two gates in place of attention."""
        return bool(self.conv_layers) and self.conv_layers[layer]

    @property
    def conv_spans(self) -> int:
        """How many layers of a cache it takes to keep the rows of such a layer."""
        return -(-self.hidden_size // (2 * self.num_kv_heads * self.head_dim))

    def recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state, in place of keys and values unless it attends as well."""
        return self.states is not None and self.state_layers[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer has keys and values."""
        others = self.recurrent(layer) or self.convolves(layer) or not self.has_mixer(layer)
        return self.attends_too(layer) or not others

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer attends, keeps a state or convolves."""
        return not self.mixing_layers or self.mixing_layers[layer]

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return self.intermediate_size > 0 and (not self.mlp_layers or self.mlp_layers[layer])

    def attends_too(self, layer: int) -> bool:
        """Whether a recurrent layer has keys and values beside its state."""
        return bool(self.attending_layers) and self.attending_layers[layer]

    def beside(self, layer: int) -> bool:
        """Whether a layer attends side by side with its state."""
        return self.shared is None and self.attends_too(layer)

    @property
    def sharing(self) -> list[int]:
        """The layers that share blocks; the first of `shared.blocks` is the first one's, and so on in turns."""
        return [layer for layer, attends in enumerate(self.attending_layers) if attends and self.shared is not None]

    def window(self, layer: int) -> int | None:
        """How many positions back layer `layer` sees, itself included; None means all of them.

        Below 0: those since the last multiple of minus that.
        """
        if self.sliding_window is None or not self.sliding_layers[layer]:
            return None
        return -self.sliding_window if self.chunked else self.sliding_window

    def mixes(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return self.experts > 0 and not (self.dense_layers and self.dense_layers[layer])

    def tempers(self, layer: int) -> bool:
        """Whether queries of layer `layer` grow with their position."""
        own = self.temperature
        return own is not None and not (own.unturned and self.layer_rope(layer).kind != "none")

    def rope_dim(self, rope: Rope) -> int:
        """The width of the heads that a rotation turns."""
        dims = (dim for layer, (_, dim) in enumerate(self.head_shapes) if self.layer_rope(layer) == rope)
        return next(dims, self.head_dim)

    def norms_units(self, layer: int) -> bool:
        """Whether layer `layer` norms queries and keys without weights."""
        return self.unit_norms and self.layer_rope(layer).kind != "none"

    def head_shape(self, layer: int) -> tuple[int, int]:
        """Key-value heads of a layer, and the width of its heads."""
        return self.head_shapes[layer] if self.head_shapes else (self.num_kv_heads, self.head_dim)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values layer `layer` reads."""
        own = self.num_layers - self.reused_layers
        if layer < own:
            return layer
        return next(each for each in reversed(range(own)) if self.sliding_layers[each] == self.sliding_layers[layer])

    def inner(self, layer: int) -> int:
        """Inner units of the MLP of a layer that has one alone."""
        if self.inners:
            return self.inners[layer]
        return self.dense_inner if self.experts else self.intermediate_size

    def reach(self, layer: int) -> float | None:
        """From how many standard deviations above their mean on a layer's gates count; None where all do."""
        share = self.sparsity[layer] if self.sparsity else 0.0
        return NormalDist().inv_cdf(share) if share else None

    def floor(self, layer: int) -> float:
        """`experts_floor` of a layer, 0 where there is none."""
        return self.experts_floor[layer] if self.experts_floor else 0.0

    def layer_rope(self, layer: int) -> Rope:
        """The rotation of layer `layer`."""
        return self.rope if self.local_rope is None or not self.turns_locally(layer) else self.local_rope

    def turns_locally(self, layer: int) -> bool:
        """Whether a layer has the rotation `local_rope`."""
        return self.local_rope is not None and (self.local_rope_layers or self.sliding_layers)[layer]
