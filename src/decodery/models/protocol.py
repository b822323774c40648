"""What the decoding loop asks of a language model, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch

from .batch import Batch, Scores
from .cache.cache import KVCache
from .config import ModelConfig
from .hooks import Tap
from .layer_plan import WHOLE, LayerPlan
from .torch.weights import Linear


@dataclass(frozen=True)
class Capabilities:
    """What a model can do beyond scoring rows of tokens.

    Attributes:
        trees: Rows of a pass may branch, as `Segment.mask` says; without it every row sees all those before it.
        chains: Rows of one text share a call; without it each is a call of its own, so that drafts do not pay.
        exact_rows: A row's result is the same, bit for bit, whatever other rows share the pass.
        states: Takes embeddings or hidden states for rows, and gives the embeddings of tokens, see `EmbeddingModel`.
        chosen: Takes tokens that lie on its device alone, see `Segment.chosen`.
        visible: Takes masks that lie there alone, too, see `Segment.visible`.
        layer_plans: Enters and leaves at any layer and skips sublayers.
        sites: Names of those that can be read and changed, see `sites.site`.
        interventions: They can be changed, too, before the logits.
        cache_kernels: Native kernels apply policies of caches by themselves.
        policies: Attention asks the policy of a cache what to read, and caches may lose slots of some heads only.
        parts: Final norm and vocabulary projection can be called apart, see `OpenModel`.
        gradients: Passes can be differentiated.
        rows: Scores rows of tokens at all; without it, it writes whole texts by itself, see `Writer`.
        logprobs: Such a model tells the log-probabilities of likely tokens.
        continues: Such a model goes on from the middle of a text.
        source: An encoder reads one, which the text is written with in view.
        costs: What passes take may decide which ones come next; not where several processes have to agree on them.
    """

    trees: bool = True
    chains: bool = True
    exact_rows: bool = False
    states: bool = False
    chosen: bool = False
    visible: bool = False
    layer_plans: bool = False
    sites: frozenset[str] = frozenset()
    interventions: bool = True
    cache_kernels: bool = False
    policies: bool = False
    parts: bool = False
    gradients: bool = False
    rows: bool = True
    logprobs: bool = True
    continues: bool = True
    source: bool = False
    costs: bool = True

    @property
    def changes(self) -> bool:
        """Whether rows can be changed between layers."""
        return "residual" in self.sites and self.interventions


class Reader(Protocol):
    """What a text can be read by: a model, or what is made of several."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def fingerprint(self) -> str:
        """What identifies its weights, the same in every precision; "" if unknown.

        Two files of one model that was quantized in two ways are two models; a model fine-tuned without touching its
        embeddings and norms is the one it was made from.
        """
        ...

    def new_cache(self) -> KVCache: ...


@runtime_checkable
class LanguageModel(Reader, Protocol):
    """Anything that scores rows of tokens against a cache."""

    def forward(self, batch: Batch, *, taps: Ordered[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """Run the rows of `batch` once; each segment's cache then holds them as tentative rows.

        Args:
            batch: Rows of one or more sequences.
            taps: Where hidden states are read, see `sites.site`.
            layer_plan: Which layers the rows pass through.

        Raises:
            SettingsError: For what the model does not have.
            UnsupportedModel: For what it cannot do.
        """
        ...


class EmbeddingModel(LanguageModel, Protocol):
    """A model with `Capabilities.states`."""

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] ids -> [n, hidden], scaled as the family scales them."""
        ...


class OpenModel(EmbeddingModel, Protocol):
    """A model with `Capabilities.parts`."""

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after the last layer -> as the vocabulary projection sees them."""
        ...

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """The vocabulary projection alone: [m, hidden] -> [m, vocab] logits, at least float32."""
        ...

    def projection(self, tokens: torch.Tensor | None) -> Linear:
        """The rows of `tokens` [k] of the vocabulary projection, as a layer of its own; None: all."""
        ...


def takes_states(model: Reader) -> TypeGuard[EmbeddingModel]:
    """Whether a model takes embeddings for rows."""
    return model.capabilities.states


def is_open(model: Reader) -> TypeGuard[OpenModel]:
    """Whether the parts of a model can be called apart."""
    return model.capabilities.parts
