"""Base class of policies that read probe tokens after a prompt, and keep the prompt tokens that these attend to."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kernel_policy import KernelPolicy
from decodery.models.config import ModelConfig
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence

from .after_prompt import SPARE, Noting


class Probing(Noting):
    """State of the policy: the attention of the probes.

    Attributes:
        asking: Whether the probes are being read.
        paid: By layer, attention [kv_heads, prompt] from the probes to the prompt, the mean over the probes and the
            heads of a group.
    """

    def __init__(self, config: ModelConfig, prompt: int, watched: int = 0) -> None:
        super().__init__(config, prompt, watched)
        self.asking = False
        self.paid: dict[int, torch.Tensor] = {}
        self._rows = 1

    def wanted(self, segment: Segment) -> bool:
        return self.asking or super().wanted(segment)

    def summed_from(self, segment: Segment) -> int | None:
        self._rows = len(segment) * self.config.num_heads // self.config.num_kv_heads
        return 0 if self.asking else None

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        return KernelPolicy(summed_from=self.summed_from(segment)) if self.asking else None

    def take_sums(self, layer: int, paid: np.ndarray) -> None:
        self.paid[layer] = torch.from_numpy(paid[:, : self.prompt] / self._rows)

    def _settle(self, cache: KVCache) -> None:
        pass

    @abstractmethod
    def compress(self, cache: KVCache) -> None:
        """Drop the tokens that the probes attend to least."""


def probed(seq: Sequence, segment: Segment) -> ForwardCoroutine[None]:
    """Read the probes of a text whose policy is `Probing`, compress its prompt, and drop the probes.

    Args:
        seq: The text.
        segment: The rows of the probes.
    """
    state = seq.cache.policy
    assert isinstance(state, Probing)
    state.asking = True
    yield from score(seq.request.model, segment)
    seq.cache.keep([])
    state.compress(seq.cache)
    state.asking, state.paid = False, {}
    seq.cache.shrink(SPARE)
