"""Cache coprocessor: latent entries, computed from the prompt's cache, which later rows attend to."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.models.trained.coprocessors import CoprocessorWeights, adapted, latents
from decodery.step.cache_policy import CachePolicy, State
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence

from .after_prompt import turned


@register(
    "coprocessor",
    paper="Deliberation in Latent Space via Differentiable Cache Augmentation (2024)",
    guarantee="lossy: rows also read latent entries; drafts give the text of plain decoding under it",
    requirements=("a trained coprocessor",),
)
@dataclass(frozen=True)
class Coprocessor(CachePolicy):
    """Adds latent embeddings to the prompt, which a trained coprocessor computes from the prompt's cache.

    The row of the last latent predicts the first token, and all rows after the prompt attend to the latents. Class F:
    no token is dropped, and the entries are added before the first draft. As in the paper, latents take the positions
    after the prompt, and the text those after the latents. Tokens keep their position numbers here: instead, the keys
    of prompt and latents are rotated back once by the number of latents, which keeps all distances. So the model needs
    rotary positions and no sliding window. Memory: keys and values of the latents, beside the cache.

    Attributes:
        trained: `CoprocessorWeights`, or the file or folder of `decodery train kv coprocessor`. The coprocessor is the
            model itself with an adapter after each layer. It reads a few learned embeddings after the prompt. The
            model then reads the output of its last layer as embeddings, whose keys and values are kept.
        latents: Number of trained latents to use, None for all; 0 is the model without a coprocessor.
    """

    requirements = Requirements(keys=True, policies=True, states=True, changes=True)

    trained: CoprocessorWeights | str | None = None
    latents: int | None = None

    def __post_init__(self) -> None:
        if self.latents is not None and self.latents < 0:
            raise SettingsError(f"latents of coprocessor must be at least 0, not {self.latents}")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        weights = CoprocessorWeights.load(self.trained, "coprocessor:trained")
        weights.require(model)
        config = model.config
        if config.learned_positions or any(config.window(layer) for layer in range(config.num_layers)):
            raise UnsupportedModel(
                "coprocessor inserts latents after the prompt, which does not work with sliding windows or "
                "learned positions: use a model with full attention in every layer and rotary positions"
            )
        return Augmented(replace(self, trained=weights), weights, model.config, prompt)

    def open(self, seq: Sequence, rows: int) -> ForwardCoroutine[torch.Tensor | None]:
        state, prompt = seq.cache.policy, seq.request.prompt_length
        assert isinstance(state, Augmented)
        tensors, count = state.weights.tensors, len(state.weights) if self.latents is None else self.latents
        count = min(count, len(state.weights), seq.request.model.config.max_positions - prompt)
        if not count:
            return None
        positions, states = np.arange(prompt, prompt + count), None
        if not state.weights.static:
            last = seq.request.model.config.num_layers
            soft = Segment(
                *(positions, None, tensors["soft"][:count]),
                cache=seq.cache,
                retained=rows,
                logit_rows=[],
                interventions=adapted(tensors),
            )
            scored = yield from score(seq.request.model, soft, (last,))
            states = scored.hidden[last]
        made = latents(tensors, states)[:count]
        given = Segment(positions, None, made, cache=seq.cache, retained=rows, logit_rows=[count - 1])
        scored = yield from score(seq.request.model, given)
        state.take(seq.cache, count)
        return scored.logits


class Augmented(State):
    """State of the policy: latent keys and values beside the cache.

    Attributes:
        entries: By layer, keys and values [kv_heads, latents, head_dim]; empty before the prompt is read.
    """

    def __init__(self, method: Coprocessor, weights: CoprocessorWeights, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method, self.weights = method, weights
        self.entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._back = 0

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return bool(self.entries)

    @property
    def bytes(self) -> int:
        """Bytes of the latent keys and values."""
        return sum(part.nbytes for entries in self.entries.values() for part in entries)

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        if self.entries:
            return 0
        config, known = self.config, len(self.weights)
        count = known if self.method.latents is None else min(self.method.latents, known)
        itemsize = torch.float32.itemsize if cache.coded else cache.pages.nothing.dtype.itemsize
        return 2 * config.num_layers * config.num_kv_heads * count * config.head_dim * itemsize

    def fork(self) -> Augmented:
        clone = Augmented(self.method, self.weights, self.config, self.prompt)
        clone.entries, clone._back = dict(self.entries), self._back
        return clone

    def take(self, cache: KVCache, count: int) -> None:
        """Store the keys and values of the last `count` tentative rows as latents."""
        for layer in range(self.config.num_layers):
            keys, values = cache.view(layer)
            self.entries[layer] = self._moved(layer, keys[:, -count:], count), values[:, -count:].clone()
        self._back = count

    def kept(self, cache: KVCache, rows: Ordered[int], layers: Ordered[int] | None) -> None:
        # The prompt's rows were tentative until its first token was chosen.
        if not self._back or not rows:
            return
        for layer in range(self.config.num_layers):
            keys, values = (each.clone() for each in cache.view(layer))
            places = cache.positions[layer, : keys.shape[1]].copy()
            cache.refill(layer, self._moved(layer, keys, self._back), values, places)
        self._back = 0

    def _moved(self, layer: int, keys: torch.Tensor, back: int) -> torch.Tensor:
        """Rotate keys [kv_heads, n, head_dim] back by `back` positions."""
        return turned(self.config, layer, keys.double(), -back).to(keys.dtype)

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.context is not None and attention.mass is not None
        context = attention.context.clone()
        entries = [part.double() for part in self.entries[attention.layer]]
        heads, dim = attention.queries.shape[1:]
        # Row by row, so that a row gets the same bits whatever other rows are in the pass.
        keys, values = entries
        for row in np.flatnonzero(attention.segment.positions >= self.prompt):
            queries = attention.queries[row].reshape(len(keys), -1, dim).double()
            scores = torch.einsum("kgd,kmd->kgm", queries, keys)
            thought = torch.einsum("kgm,kmd->kgd", scores.softmax(dim=-1), values).reshape(heads, dim)
            share = torch.sigmoid(attention.mass[row].double() - scores.logsumexp(dim=-1).reshape(heads))[:, None]
            context[row] = (share * context[row].double() + (1 - share) * thought).to(context.dtype)
        return context
