"""Policies that read rows of their own after a prompt, and keep of the prompt what these attend to."""

from __future__ import annotations

from abc import abstractmethod

import torch

from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence

from .after_prompt import SPARE, Noting
from .selecting import precise


class Probing(Noting):
    """State of the policy: what probes attend to.

    Args:
        asking: Whether they are being read.
        paid: By layer, what probes pay to the prompt [kv_heads, prompt], the mean over them and the heads of a group.
    """

    def __init__(self, config: ModelConfig, prompt: int, watched: int = 0) -> None:
        super().__init__(config, prompt, watched)
        self.asking = False
        self.paid: dict[int, torch.Tensor] = {}

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self.asking

    def observe(self, attention: Attention) -> None:
        weights = attention.weights
        if not self.asking or weights is None:
            return
        grouped = precise(weights).reshape(len(attention.keys), -1, *weights.shape[1:])
        self.paid[attention.layer] = grouped[..., : self.prompt].mean(dim=(1, 2))

    def _settle(self, cache: KVCache) -> None:
        pass

    @abstractmethod
    def compress(self, cache: KVCache) -> None:
        """Let go of what the probes have passed over."""


def probed(seq: Sequence, segment: Segment) -> ForwardCoroutine[None]:
    """Read the probes of a text whose policy is `Probing`, and compress its prompt.

    Nothing of them is kept.
    """
    state = seq.cache.policy
    assert isinstance(state, Probing)
    state.asking = True
    yield from score(seq.request.model, segment)
    seq.cache.keep([])
    state.compress(seq.cache)
    state.asking, state.paid = False, {}
    seq.cache.shrink(SPARE)
