"""Cache coprocessor: entries that no token wrote, made of what was read, which later rows attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..core.ask import Asking, score
from ..core.needs import Needs
from ..core.sequence import Sequence
from ..errors import SettingsError
from ..model.batch import Segment
from ..model.cache import KVCache
from ..model.config import ModelConfig
from ..model.coprocessors import CoprocessorWeights, adapted, latents
from ..model.policy import Attention, AttentionPolicy
from ..model.protocol import LanguageModel
from ..registry import register
from .base import CachePolicy, State


@register(
    "coprocessor",
    paper="Deliberation in Latent Space via Differentiable Cache Augmentation (2024)",
    guarantee="lossy: rows read entries that no token wrote; drafts give the text of plain decoding under it",
    needs=("a trained coprocessor",),
)
@dataclass(frozen=True)
class Coprocessor(CachePolicy):
    """Lets the model think about a prompt once: what its trained double makes of it is read as if it were text.

    trained: `CoprocessorWeights`, or the file or folder of `decodery train kv coprocessor`. The double is the model
    itself with an adapter behind each layer; it reads a few learned embeddings behind the prompt, and what comes out of
    its last layer is given to the model as embeddings, whose keys and values stay. latents: how many of those that were
    trained, None for all; 0 leaves the model as it is. Rows behind the prompt read them, so that the first token is the
    model's own and what comes after has been thought about. Class F: nothing is lost, entries are added before the
    first draft.

    Latents stand at the positions of the tokens to come, which are not moved by them; the paper's reading moves them.
    They lie beside the cache: `latents` tokens' keys and values more.
    """

    needs = Needs(keys=True, policies=True, states=True, changes=True)

    trained: CoprocessorWeights | str | None = None
    latents: int | None = None

    def __post_init__(self) -> None:
        if self.latents is not None and self.latents < 0:
            raise SettingsError(f"latents of coprocessor must be at least 0, not {self.latents}")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        found = self.trained
        if found is None:
            raise SettingsError(
                "coprocessor needs to be trained: make one with `decodery train kv coprocessor --out DIR` and name it, "
                "as in coprocessor:trained=DIR"
            )
        weights = CoprocessorWeights.load(found) if isinstance(found, str) else found
        weights.require(model)
        return Augmented(replace(self, trained=weights), weights, model.config, prompt)

    def settle(self, seq: Sequence) -> Asking[None]:
        state, prompt = seq.cache.policy, seq.prompt_length
        assert isinstance(state, Augmented)
        tensors, count = state.weights.tensors, len(state.weights) if self.latents is None else self.latents
        count = min(count, len(state.weights), seq.model.config.max_positions - prompt)
        if not count:
            return
        positions, states = np.arange(prompt, prompt + count), None
        if not state.weights.static:
            last = seq.model.config.num_layers
            soft = Segment(
                *(positions, None, tensors["soft"][:count]),
                cache=seq.cache,
                logit_rows=[],
                interventions=adapted(tensors),
            )
            scored = yield from score(seq.model, soft, (last,))
            seq.cache.keep([])
            states = scored.hidden[last]
        made = latents(tensors, states)[:count]
        yield from score(seq.model, Segment(positions, None, made, cache=seq.cache, logit_rows=[]))
        state.take(seq.cache, count)
        seq.cache.keep([])


class Augmented(State):
    """entries: by layer, keys and values [kv_heads, latents, head_dim] that lie beside the cache; none at first."""

    def __init__(self, method: Coprocessor, weights: CoprocessorWeights, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method, self.weights = method, weights
        self.entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def acts(self, layer: int) -> bool:
        return True

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return bool(self.entries)

    @property
    def bytes(self) -> int:
        """Of what is held beside the cache."""
        return sum(part.nbytes for entries in self.entries.values() for part in entries)

    def fork(self) -> Augmented:
        twin = Augmented(self.method, self.weights, self.config, self.prompt)
        twin.entries = dict(self.entries)
        return twin

    def take(self, cache: KVCache, count: int) -> None:
        """Hold the keys and values of the last `count` tentative rows."""
        for layer in range(self.config.num_layers):
            keys, values = cache.view(layer)
            self.entries[layer] = keys[:, -count:].clone(), values[:, -count:].clone()

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.context is not None and attention.mass is not None
        context = attention.context.clone()
        entries = [part.double() for part in self.entries[attention.layer]]
        heads, dim = attention.queries.shape[1:]
        window, behind = self.config.window(attention.layer), attention.segment.positions - self.prompt
        # Row by row, so that a row's are the same to the bit whatever rows stand beside it.
        for row in np.flatnonzero(behind >= 0):
            # Latents leave a sliding window as the tokens at their positions do.
            gone = 0 if window is None else max(int(behind[row]) - window + 1, 0)
            keys, values = (part[:, gone:] for part in entries)
            if not keys.shape[1]:
                continue
            queries = attention.queries[row].reshape(len(keys), -1, dim).double()
            scores = torch.einsum("kgd,kmd->kgm", queries, keys)
            thought = torch.einsum("kgm,kmd->kgd", scores.softmax(dim=-1), values).reshape(heads, dim)
            share = torch.sigmoid(attention.mass[row].double() - scores.logsumexp(dim=-1).reshape(heads))[:, None]
            context[row] = (share * context[row].double() + (1 - share) * thought).to(context.dtype)
        return context
