"""One lean transformer for families from Llama to Gemma 3, mixtures of experts among them, and for masked diffusion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.native.kernels import library
from decodery.core.threads import one_thread

from ..batch import Batch, Cost, Scores
from ..cache import coded
from ..cache.cache import KVCache
from ..config import ModelConfig
from ..cuda.graphs import StaticPasses
from ..hooks import SITES, HookPoint, Hooks, Tap
from ..layer_plan import WHOLE, LayerPlan, LayerStep, abreast, attending, groups, layer_steps
from ..loaders.in_place import Rows, WeightsInPlace
from ..native.array_step import ArraySteps
from ..native.experts import MOST_BEST, MOST_GROUPS, distinct
from ..native.stack import NativeStack
from ..protocol import Capabilities
from ..tokenizers.vocabularies import Padding
from ..trained.artifact import digest, sampled
from .attention import capped
from .layers import TorchLayers
from .mixture import mixtures
from .one_pass import Pass, apart, open_caches, to_device
from .portable import PortableStack, softly
from .token_inputs import token_inputs
from .weights import QUANTIZED, Linear, Weights


class Transformer(TorchLayers):
    """Runs `Weights` as `ModelConfig` describes them.

    `embed`, `layers` and `head` can be called apart. Rows of all segments share the linear layers; attention works per
    segment, over its cache and its own rows.

    Args:
        cache_dtype: Of the keys and values that new caches hold, the model's own but where `narrow_caches` was called.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self._stack: NativeStack | PortableStack | None = None
        if self.device.type == "cpu" and not config.shortcuts:
            native, whole = runs_natively(config), isinstance(weights.head, QUANTIZED)
            if native and (whole or self.dtype.itemsize == 2) and packable(weights):
                mixers = {layer: own for layer, mixer in self._mixers.items() if (own := mixer.native) is not None}
                self._stack = NativeStack(config, weights, self.angles, mixers=mixers)
                self.dtype = torch.float32
            elif whole and config.portable:
                self._stack = PortableStack(config, weights, self.angles)
        self.cache_dtype = self.dtype
        if config.experts and self._stack is None:
            self._mixtures = mixtures(weights, config, self._activation)
        self.static: StaticPasses | None = None
        if self.device.type == "cuda" and config.static_shapes:
            self.static = StaticPasses()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def capabilities(self) -> Capabilities:
        exact = self._stack is not None
        return Capabilities(
            exact_rows=exact,
            states=not self.config.layer_inputs,
            chosen=self.device.type != "cpu" and not self.config.layer_inputs,
            visible=self.pages_together and self.config.causal and not (self.config.layer_inputs or apart(self.config)),
            layer_plans=not (self.config.shortcuts or self.config.keeps_order or self.config.unit_values),
            sites=SITES,
            # Some turn the keys that they keep, which norms after the rotation do not allow.
            policies=not (
                self.config.keeps_order
                or self.config.unusual_softmax
                or self.config.norms_after_rope
                or self.config.chunked
                or self.config.unit_values
            ),
            # What leaves the last layer is several streams.
            parts=self.config.alternating is None,
            gradients=not exact,
            cache_kernels=isinstance(self._stack, NativeStack),
        )

    @cached_property
    def fingerprint(self) -> str:
        norms = [norm for layer in self.weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        table = self.weights.rows(sampled(self.weights.norm.device, self.weights.tokens))
        return digest(table, *norms, self.weights.norm)

    def new_cache(self) -> KVCache:
        config = self.config
        shape = config.cache_layers, config.num_kv_heads, config.head_dim
        own = config.num_layers - config.reused_layers
        windowed = [layer for layer in range(own) if config.window(layer)]
        # Rows that see later ones are computed out of order, and may come back to what lies after.
        window = config.sliding_window if windowed and config.causal else None
        cache = KVCache(*shape, dtype=self.cache_dtype, device=self.device, window=window, windowed=windowed)
        if (states := config.states) is not None:
            numbers = sum(config.state_layers) * states.heads * states.head_dim * states.state
            cache.states.size = numbers * max(self.dtype.itemsize, torch.float32.itemsize)
        return cache

    def narrow_caches(self, dtype: torch.dtype) -> None:
        """Let new caches hold keys and values in `dtype`.

        torch.float16: attention computes in float32 as before. torch.int8: a row's numbers are bytes with a scale
        (`coded`), and its scores are sums of integers. On a device, where attention of all texts is one call,
        torch.int8 and torch.float8_e4m3fn are bytes with a scale that it multiplies.

        Raises:
            SettingsError: If the rows of a pass are not computed by themselves, bit for bit, or together on a device.
        """
        name = str(dtype).removeprefix("torch.")
        if self.pages_together:
            config, bytes_of = self.config, {torch.int8: coded.DTYPE, torch.float8_e4m3fn: coded.FLOATS}
            if dtype not in bytes_of or config.keeps_order or config.head_shapes or config.reused_layers:
                raise SettingsError(
                    f"keys and values of {config.family} on a device are not kept in {name}: choose int8 or float8 for "
                    "a model whose layers attend alike, or leave kv_dtype at auto"
                )
            self.cache_dtype = bytes_of[dtype]
            return
        if dtype == torch.float8_e4m3fn:
            raise SettingsError("keys and values are kept in float8 on devices alone: choose int8")
        if self._stack is None:
            raise SettingsError(
                f"keys and values can be kept in {name} where rows are exact: load with dtype int8 or int4, "
                "or in 16 bits on a CPU that has native kernels"
            )
        if self.config.keeps_order:
            raise SettingsError(
                f"{self.config.family} keeps states of its rows, which {name} would change: leave kv_dtype at auto"
            )
        if dtype == coded.DTYPE and self.config.head_shapes:
            raise SettingsError(
                f"heads of {self.config.family} differ from layer to layer: choose float16 keys and values"
            )
        if dtype == coded.DTYPE and self.config.head_dim > coded.WIDEST:
            raise SettingsError(f"keys of more than {coded.WIDEST} numbers are not kept in {name}: choose float16")
        self.cache_dtype = dtype

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`.

        Small passes run at fixed shapes where `static` is set, as it is on a GPU.
        """
        hooks = Hooks.of(batch, taps, layer_plan, self.config.num_layers, steers=not self.config.keeps_order)
        if self.static is not None and layer_plan == WHOLE:
            scores = self.static.forward(self, batch, hooks)
            if scores is not None:
                return scores
        if self._stack is not None:
            with one_thread():
                return self._pass(batch, hooks, layer_plan)
        return self._pass(batch, hooks, layer_plan)

    def _pass(self, batch: Batch, hooks: Hooks, layer_plan: LayerPlan) -> Scores:
        hidden = self.layers(self.embed(batch), batch, hooks, layer_plan)
        rows, bounds = batch.logit_rows
        if not np.array_equal(rows, np.arange(batch.rows)):
            hidden = hidden[to_device(rows, self.device)]
        logits = self.head(hidden, hooks)
        row_bytes = 2 * self.config.num_kv_heads * coded.row_bytes(self.config.head_dim, self.cache_dtype)
        costs = [Cost.of(segment, layer_plan, self.config.num_layers, row_bytes) for segment in batch.segments]
        if hooks.chosen:
            taken = torch.stack(hooks.chosen).cpu().numpy()
            costs = [
                dataclasses.replace(cost, experts=distinct(taken[:, first : first + cost.rows].reshape(len(taken), -1)))
                for cost, first in zip(costs, batch.offsets, strict=False)
            ]
        return Scores(logits, bounds, hooks.tapped(), batch.offsets, costs)

    @property
    def table(self) -> torch.Tensor | Rows | None:
        """[vocab, hidden] the embeddings, where kernels can read them as they lie; None elsewhere."""
        if isinstance(self.weights, WeightsInPlace) and self.weights.table is not None:
            return self.weights.table
        table = self.weights.embedding
        fits = table.device.type == "cpu" and table.is_contiguous() and table.dtype.itemsize in (2, 4)
        return table if fits and table.is_floating_point() else None

    def array_steps(self, padding: Padding | None) -> ArraySteps | None:
        """What takes whole steps of many texts in native calls; None where PyTorch has a part in its passes.

        Args:
            padding: Ids that no text is to choose.
        """
        if not isinstance(self._stack, NativeStack) or not self.config.causal or self.config.keeps_order:
            return None
        if self.weights.kept is not None or self.weights.positions is not None or self.config.temperature is not None:
            return None
        if self.config.unit_values:
            return None
        return ArraySteps(self, self._stack, padding)

    def embed(self, batch: Batch) -> torch.Tensor:
        """[N, hidden] inputs of the first layer, from token embeddings or a segment's own states."""
        given = [segment.tokens for segment in batch.segments if segment.tokens is not None and segment.states is None]
        if len(given) == len(batch.segments):
            # One look for all: of many texts with a row each, looking costs more than copying.
            return self.embed_tokens(batch.with_chosen(to_device(np.concatenate(given), self.device)))
        parts = []
        for segment in batch.segments:
            if segment.states is not None:
                parts.append(segment.states.to(self.device, self.dtype))
            else:
                assert segment.tokens is not None
                own = to_device(segment.tokens, self.device)
                parts.append(self.embed_tokens(own if segment.chosen is None else segment.chosen.clamp(min=0)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.embed_tokens`."""
        if self.weights.kept is not None:
            tokens = self.weights.kept.rows[tokens]
        rows = self.weights.rows(tokens).to(self.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def layers(
        self, hidden: torch.Tensor, batch: Batch, hooks: Hooks | None = None, layer_plan: LayerPlan = WHOLE
    ) -> torch.Tensor:
        """Run the layers of a route over [N, hidden]; returns the residual stream after them."""
        config, layers = self.config, self.config.num_layers
        hooks = Hooks.reading(()) if hooks is None else hooks
        open_caches(batch, config, None if layer_plan == WHOLE else attending(layer_plan, layers))
        run = layer_steps(layer_plan, layers)
        first = run[0].layer if run else 0
        if self.weights.positions is not None and first == 0:
            hidden = hidden + self.weights.positions[to_device(batch.positions, self.device)].to(self.dtype)
        if config.joined_norms and first == 0:
            hidden = self._norm(hidden, self.weights.norm)
        stack, step = self._stack, Pass(self, batch)
        if config.layer_inputs:
            packed = stack.inputs_projection if isinstance(stack, NativeStack) else None
            step.inputs = token_inputs(self.weights.inputs[0], config, hidden, batch, packed)
        hidden = hooks.enter(first, hidden)

        def through(rows: torch.Tensor, some: Sequence[LayerStep]) -> torch.Tensor:
            if isinstance(stack, NativeStack):
                return stack.layers(rows, batch, some, hooks, step.inputs)
            return self.blocks(rows, step, some, hooks) if stack is None else stack.layers(rows, batch, some, hooks)

        if layer_plan.abreast == 1:
            return through(hidden, run)
        if hooks:
            raise UnsupportedModel("rows that pass several layers at a time cannot be read or changed on their way")
        return abreast(hidden, groups(layer_plan, layers), through)

    def head(self, hidden: torch.Tensor, hooks: Hooks | None = None) -> torch.Tensor:
        """Final norm and vocabulary projection: [M, hidden] -> [M, vocab] logits, at least float32.

        Tokens that the model has no output for get -inf.
        """
        if hooks is not None and HookPoint("final_norm") in hooks:
            logits = self.project(hooks.visit(HookPoint("final_norm"), self.final_norm(hidden)))
        else:
            logits = self._spread(self.outputs(hidden))
        return logits if hooks is None else hooks.visit(HookPoint("logits"), logits)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head`, of the tokens alone that have an output."""
        return self._stack.head(hidden) if self._stack is not None else self._outputs(self.final_norm(hidden))

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
        return self._norm(hidden, self.weights.norm)

    def _outputs(self, normed: torch.Tensor) -> torch.Tensor:
        if self._stack is not None:
            return softly(self._stack.project(normed), self.config.logit_cap)
        logits = self.weights.head(normed)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return capped(logits, self.config.logit_cap)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, from those of the tokens that have an output."""
        kept = self.weights.kept
        if kept is None:
            return logits
        every = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return every.index_copy_(1, kept.ids, logits)


def packable(weights: Weights) -> bool:
    """Whether kernels have a form for what layers project beside the usual matrices."""
    names = (
        *("steps", "out_gate", "q_up", "shared_gate_up", "shared_down", "input_gate", "input_out"),
        *("mix_in", "mix_out", "laurel_in", "laurel_out"),
    )
    more = [linear for layer in weights.layers for name in names if (linear := getattr(layer, name)) is not None]
    of_inputs = "projection", "stream_in", "stream_out"
    more += [each for inputs in weights.inputs for name in of_inputs if (each := getattr(inputs, name)) is not None]
    return all(isinstance(linear, QUANTIZED) or linear.weight.dtype.itemsize == 2 for linear in more)


def runs_natively(config: ModelConfig) -> bool:
    """Whether the native CPU kernels run a model of this configuration in a supported precision."""
    if config.shortcuts or not config.native:
        return False
    mixed = config.summed_experts or any(config.experts_floor)
    mixed = mixed or config.expert_groups > MOST_GROUPS or (config.expert_groups > 0 and config.group_best > MOST_BEST)
    return library() is not None and not mixed
