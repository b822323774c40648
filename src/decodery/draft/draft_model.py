"""A second, smaller language model drafts a chain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from ..budget.base import Budget
from ..core.noise import gumbel_argmax
from ..core.sequence import Sequence
from ..core.tree import Origin, TokenTree
from ..errors import SettingsError, VocabularyMismatch
from ..model.batch import Batch, Segment
from ..model.cache import KVCache
from ..model.protocol import LanguageModel
from ..registry import register
from .base import Drafter, Observation

_CHUNK = 512


@register(
    "draft-model",
    paper="Fast Inference from Transformers via Speculative Decoding (2023)",
    lossless=True,
    needs=("a second model with the same vocabulary",),
)
@dataclass(frozen=True)
class DraftModel(Drafter):
    """Lets a smaller model with the same vocabulary write the next few tokens as the target's sampler would.

    model: a `LanguageModel`, or a name `decodery.load` knows. length: tokens drafted per step. Draft tokens use the
    target's warps and the target's noise, so that under the coupled rule two models that agree draw the same token;
    where the rule wants them, the draft's distributions go along. Scope: the request; memory: one more cache.
    """

    model: LanguageModel | str
    length: int = 4

    origin: ClassVar[Origin] = "sampled"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SettingsError(f"draft-model needs length >= 1, not {self.length}")

    @property
    def language_model(self) -> LanguageModel:
        return _load(self.model) if isinstance(self.model, str) else self.model

    def start(self, seq: Sequence) -> KVCache:
        model = self.language_model
        if model.vocab_size != seq.vocab_size:
            raise VocabularyMismatch(
                f"the draft model has {model.vocab_size} tokens and the target {seq.vocab_size}: "
                "draft with a model that shares the target's tokenizer"
            )
        return model.new_cache()

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        length = min(self.length, budget.nodes, budget.depth)
        if length < 1:
            return TokenTree.root(seq.pending)
        sampler, context = seq.sampler, seq.context()
        drafted: list[int] = []
        laws: dict[int, torch.Tensor] = {}
        logits = self._read(seq.draft_state, seq.tokens)
        while True:
            law = sampler.law(logits, [context])
            if seq.rule.uses_draft_distributions:
                laws[len(drafted)] = sampler.probabilities(law)[0]
            drafted.append(int(sampler.pick(law, seq.seed, [context.position])[0]))
            if len(drafted) == length or drafted[-1] in seq.eos_ids:
                return TokenTree.chain(seq.pending, drafted, origin="sampled", distributions=laws)
            context = sampler.extend(context, drafted[-1], logits[0])
            logits = self._read(seq.draft_state, context.tokens)

    def observe(self, seq: Sequence, seen: Observation) -> None:
        # The draft's cache holds the text before this step, the pending token and all drafted tokens but the last.
        before = len(seq.tokens) - len(seen.emitted)
        seq.draft_state.truncate(before + min(len(seen.path), len(seen.emitted)))

    def _read(self, cache: KVCache, tokens: list[int]) -> torch.Tensor:
        """Feed what the draft's cache lacks of `tokens`; the logits [1, vocab] after the last one."""
        model = self.language_model
        while True:
            chunk = np.asarray(tokens[cache.next_position : cache.next_position + _CHUNK])
            final = cache.next_position + len(chunk) == len(tokens)
            segment = Segment.chunk(chunk, cache, logit_rows=[len(chunk) - 1] if final else [])
            scores = model.forward(Batch([segment]))
            cache.keep(range(len(chunk)))
            if final:
                return scores.logits


@lru_cache(maxsize=4)
def _load(name: str) -> LanguageModel:
    from ..model.load import load

    return load(name).model
