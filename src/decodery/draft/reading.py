"""A second model, or the same one with another context, reading along with a text that may take drafts back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import VocabularyMismatch
from ..model.batch import Batch, Segment
from ..model.cache import KVCache
from ..model.protocol import LanguageModel

_CHUNK = 512


@dataclass(slots=True)
class Reading:
    """What `model` has read. tokens: what its cache holds; logits: [1, vocab] after the last of them.

    hidden: [hidden], the last layer's state of the last token, where `tapped`. settled: how many of `tokens` are known
    to be text, which never changes.
    """

    model: LanguageModel
    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    tapped: bool = False
    settled: int = 0

    @classmethod
    def begin(cls, model: LanguageModel, vocab_size: int, *, tapped: bool = False, slots: int | None = None) -> Reading:
        """Nothing read yet. slots: see `Sequence`.

        Raises VocabularyMismatch unless the model has `vocab_size` tokens.
        """
        if model.vocab_size != vocab_size:
            raise VocabularyMismatch(
                f"the draft model has {model.vocab_size} tokens and the target {vocab_size}: "
                "draft with a model that shares the target's tokenizer"
            )
        cache = model.new_cache()
        if slots is not None:
            cache.provide(slots)
        return cls(model, cache, tapped=tapped)

    def text(self, tokens: list[int]) -> torch.Tensor:
        """The logits [1, vocab] after `tokens`, which are settled; drafts that departed from them are forgotten."""
        self.settle(tokens)
        return self.draft(tokens)

    def draft(self, tokens: list[int]) -> torch.Tensor:
        """The logits [1, vocab] after `tokens`, which begin with what is settled; what has not been read is fed."""
        self._agree(tokens)
        last = self.model.config.num_layers
        while self.logits is None or len(self.tokens) < len(tokens):
            chunk = tokens[len(self.tokens) : len(self.tokens) + _CHUNK]
            final = len(self.tokens) + len(chunk) == len(tokens)
            segment = Segment.chunk(np.asarray(chunk), self.cache, logit_rows=[len(chunk) - 1] if final else [])
            scores = self.model.forward(Batch([segment]), taps=[last] if self.tapped else [])
            self.cache.keep(range(len(chunk)))
            self.tokens += chunk
            self.logits = scores.logits if final else None
            self.hidden = scores.hidden[last][-1] if self.tapped else None
        return self.logits

    def hold(self, tokens: list[int]) -> None:
        """Let the cache hold `tokens`, which are settled, and nothing more; their logits are not needed."""
        if len(self.tokens) > len(tokens) and self.tokens[: len(tokens)] == tokens:
            self._cut(len(tokens))
            self.settled = len(tokens)
        elif self.tokens != tokens:
            self.text(tokens)

    def settle(self, text: list[int]) -> None:
        """Forget drafts that departed from `text`, which is settled."""
        self._agree(text)
        self.settled = len(self.tokens)

    def _agree(self, tokens: list[int]) -> None:
        """Forget what has been read beyond the beginning that it shares with `tokens`."""
        shared, end = self.settled, min(len(self.tokens), len(tokens))
        while shared < end and self.tokens[shared] == tokens[shared]:
            shared += 1
        if shared < len(self.tokens) or self.logits is None:
            # Logits are there for the last token alone, so that one is read again where it is the last one asked for.
            self._cut(min(shared, len(tokens) - 1))

    def _cut(self, length: int) -> None:
        self.cache.truncate(length)
        del self.tokens[length:]
        self.logits = self.hidden = None
        self.settled = min(self.settled, length)
