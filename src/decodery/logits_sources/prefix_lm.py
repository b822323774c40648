"""Prefix language models: prompt tokens attend to the whole prompt, output tokens to all earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import PromptError, SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Tap
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, ForwardResult, OfOneModel, score
from decodery.step.logits_source import LogitsSource

MOST = 1 << 14
"""Maximum number of prompt tokens; the mask has an entry for each pair, 256 MiB in total."""


@register(
    "prefix-lm",
    paper="UniXcoder: Unified Cross-Modal Pre-training for Code Representation (2022)",
    guarantee="the distribution of the model with attention both ways within the prompt, for any chunks of the prompt",
)
@dataclass(frozen=True)
class PrefixLM(LogitsSource):
    """Uses bidirectional attention within the prompt, and writes after it from left to right.

    It is for models that were trained so, such as UniXcoder in its encoder-decoder mode. Other models write other texts
    than without it. The prompt is always read as a whole in one pass: read in parts, its first tokens would not attend
    to its last ones. It is read again where the memory of a text was given up. Cost: one pass over the prompt, and its
    keys and values twice until all of it is copied. A pass over n tokens needs a mask of n * n bytes, so prompts have
    at most 16,384 tokens.
    """

    provides = Provides(exact_rows=True)

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        if not isinstance(model, Transformer) or model.config.keeps_order:
            raise UnsupportedModel(
                "prefix-lm needs a model with attention in both directions over a prompt: load one that this package "
                "runs itself and that has no recurrent or convolutional layers"
            )
        if len(prompt) > MOST:
            raise PromptError(
                f"prefix-lm reads a prompt in one pass, and this one has {len(prompt):,} tokens: shorten it to {MOST:,}"
            )
        return Prefixing(model, tuple(prompt))


@dataclass(frozen=True, eq=False)
class _Read:
    """The result of reading the prompt.

    It has keys and values [layers, 2, kv_heads, n, head_dim] of the prompt's tokens from number `first` on, and logits
    [vocab] after the last one.
    """

    first: int
    data: torch.Tensor
    logits: torch.Tensor


class Prefixing(OfOneModel):
    """A model with bidirectional attention to one prompt."""

    model: Transformer

    def __init__(self, model: Transformer, prompt: tuple[int, ...]) -> None:
        self.model, self.prompt = model, prompt
        self._read: _Read | None = None

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        """See `Composed`.

        Raises:
            SettingsError: If the prompt is not the one it was made for.
        """
        n, cache = len(self.prompt), segment.cache
        own = int((segment.positions < n).sum())
        if not own:
            return (yield from score(self.model, segment, taps, role))
        places = segment.positions[:own]
        if cache is None or segment.tokens is None or taps:
            raise SettingsError("prefix-lm scores tokens that are kept in a cache, and gives no hidden states of them")
        if any(self.prompt[place] != token for place, token in zip(places, segment.tokens, strict=False)):
            raise SettingsError("prefix-lm was made for another prompt: make one for this prompt")
        wanted = range(len(segment)) if segment.logit_rows is None else segment.logit_rows
        said = {int(places[row]) for row in wanted if row < own}
        read = self._read
        logits = {} if read is None else {n - 1: read.logits}
        if read is None or places.min() < read.first or said - {n - 1}:
            read, logits = yield from self._reading(sorted(said | {n - 1}), role)
        self._copy(read, cache, places, segment.retained)
        # After the whole prompt was read, only its last row can be requested again.
        last = places.max() == n - 1
        self._read = _Read(n - 1, read.data[:, :, :, n - 1 - read.first :].clone(), read.logits) if last else read
        found = [logits[int(places[row])] for row in wanted if row < own]
        cost = None
        if own < len(segment):
            behind = Segment(
                segment.positions[own:],
                segment.tokens[own:],
                mask=segment.seen()[own:],
                cache=cache,
                logit_rows=[row - own for row in wanted if row >= own],
                retained=segment.retained + own,
            )
            scored = yield from score(self.model, behind, (), role)
            found, cost = [*found, *scored.logits], scored.cost
        return ForwardResult(torch.stack(found) if found else read.logits[None, :][:0], cost=cost)

    def _reading(self, wanted: list[int], role: str) -> ForwardCoroutine[tuple[_Read, dict[int, torch.Tensor]]]:
        """All of the prompt in one pass, and logits [vocab] after the tokens with these numbers."""
        n, cache = len(self.prompt), self.model.new_cache()
        whole = Segment(
            np.arange(n),
            np.asarray(self.prompt, dtype=np.int64),
            mask=np.ones((n, n), dtype=bool),
            cache=cache,
            logit_rows=wanted,
        )
        (scored,) = yield [ForwardRequest(self.model, whole, role=role)]
        cache.keep(range(n))
        logits = dict(zip(wanted, scored.logits, strict=True))
        return _Read(0, cache.data[:, :, :, :n], logits[n - 1]), logits

    def _copy(self, read: _Read, cache: KVCache, places: np.ndarray, retained: int) -> None:
        """Copy the rows of the prompt at these positions into a cache, as tentative rows."""
        cache.reserve(places, retained)
        rows = torch.from_numpy(places - read.first).to(read.data.device)
        for layer, (keys, values) in enumerate(read.data[:, :, :, rows]):
            cache.write(layer, keys.transpose(0, 1), values.transpose(0, 1))
