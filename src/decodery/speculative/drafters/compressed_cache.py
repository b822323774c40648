"""The target itself drafts, with a cache that a policy has made smaller."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.step.cache_policy import CachePolicy
from decodery.step.sequence import Sequence

from .follower import Follower
from .following import Following


@register(
    "compressed-cache",
    paper="MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative Decoding "
    "(2024)",
    lossless=True,
)
@dataclass(frozen=True)
class CompressedCache(Following):
    """Drafts with the target under a cache policy.

    Verified with all keys and values, the text is the full model's. The prompt is read a second time, under the policy.
    Scope: the request; memory: one more cache, as large as the policy leaves it.

    Attributes:
        cache_policy: The policy, as an instance or a text, such as "snapkv:budget=0.1".
        length: Tokens of a chain.
        tree_policy: How trees are grown in place of it. It pays where reading keys and values is what a pass costs:
            long texts, many at once.
    """

    cache_policy: CachePolicy | str = "streaming-llm"

    requirements = Requirements(keys=True, policies=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cache_policy", resolve("cache-policy", self.cache_policy))
        if self._kv.probes:
            raise SettingsError("compressed-cache cannot draft under a policy that reads pseudo tokens: use snapkv")

    def start(self, seq: Sequence) -> Follower:
        # Its first pass reads the first token after the prompt, too.
        return Follower.begin(
            self._kv.over(seq.request.model, len(seq.tokens) + 1), seq.request.model, slots=seq.request.slots
        )

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return (target,)

    @property
    def _kv(self) -> CachePolicy:
        assert isinstance(self.cache_policy, CachePolicy)
        return self.cache_policy
