"""A masked diffusion model with exact marginals, so that all losses on it are those of the method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from decodery.models.batch import Batch, Scores, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import Capabilities

_FLOOR = 1e-9
"""Replaces a probability of 0, so that every token has a finite logit."""


class OracleDenoiser:
    """A model with a fixed set of answers to a prompt, and their probabilities.

    The last token of its vocabulary is the mask. A row's distribution is that of its token among the answers that agree
    with all written tokens. If there is none, tokens of one pass contradict each other: the distribution is then that
    among the nearest answers, and `dead` counts these passes. It reads whole canvases, so it works without a cache
    only.

    Args:
        answers: [n, length] token ids.
        vocab_size: Number of tokens, including the mask.
        prompt_length: Number of tokens before an answer.
        weights: [n] probabilities of the answers, None for uniform ones.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        prompt_length: int = 1,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.answers = np.asarray(answers, dtype=np.int64)
        self.weights = np.ones(len(self.answers)) if weights is None else np.asarray(weights, dtype=np.float64)
        self.prompt_length = prompt_length
        self.vocab_size = vocab_size
        self.dead = 0
        self.device = torch.device("cpu")
        self.dtype = torch.float64
        self.capabilities = Capabilities(exact_rows=True)
        self.fingerprint = ""
        self.config = ModelConfig(
            vocab_size, 1, 1, 1, 1, 1, 2, max_positions=4096, family="oracle", causal=False, mask_id=vocab_size - 1
        )
        self._one_hot = np.eye(vocab_size)[self.answers]

    def new_cache(self) -> KVCache:
        return KVCache(1, 1, 2, dtype=torch.float64, capacity=16)

    def laws(self, written: np.ndarray) -> np.ndarray:
        """[length, vocab] probabilities, given the written tokens [length] with masks at open positions."""
        far = ((written != self.answers) & (written != self.config.mask_id)).sum(axis=1)
        self.dead += int(far.min() > 0)
        weights = self.weights * (far == far.min())
        found: np.ndarray = np.tensordot(weights, self._one_hot, axes=1) / weights.sum()
        return found

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        logits = [self._segment(segment) for segment in batch.segments]
        _, bounds = batch.logit_rows
        return Scores(torch.from_numpy(np.concatenate(logits)), bounds, {}, batch.offsets)

    def _segment(self, segment: Segment) -> np.ndarray:
        assert segment.tokens is not None and segment.cache is None, "the oracle reads whole canvases of tokens"
        whole = np.full(self.prompt_length + self.answers.shape[1], self.config.mask_id)
        whole[segment.positions] = segment.tokens
        laws = np.zeros((len(whole), self.vocab_size))
        laws[self.prompt_length :] = self.laws(whole[self.prompt_length :])
        rows = np.arange(len(segment)) if segment.logit_rows is None else np.asarray(segment.logit_rows)
        found: np.ndarray = np.log(laws[segment.positions[rows]] + _FLOOR)
        return found
