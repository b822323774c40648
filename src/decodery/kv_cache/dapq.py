"""DapQ: pseudo queries at the positions where the answer will be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, best, entries, require_budget
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .after_prompt import pooled, retain
from .probing import Probing, probed


@register(
    "dapq",
    paper=(
        "Where Matters More Than What: Decoding-aligned KV Cache Compression via Position-aware Pseudo Queries (2026)"
    ),
    guarantee="lossy: most of the prompt is dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class DapQ(CachePolicy):
    """Keeps the prompt tokens that queries at the positions of the first output tokens attend to.

    Class B. Only the paper's abstract was available: the number of queries, their content and the pooling are ours.

    Attributes:
        budget: See `CachePolicy`, of the prompt.
        queries: Number of pseudo tokens, which an extra pass reads after the prompt. Their attention to the prompt is
            averaged over them and over the heads of a group. They are then dropped, so the text follows the prompt.
        content: Tokens of the queries. "last" repeats the prompt's last token. "copy" repeats its last tokens, which
            attend to what followed them before. A number is a token id, such as a line break.
        kernel: Number of neighbouring tokens over which scores are averaged.
        recent: Last tokens of the prompt that are always kept.
    """

    budget: float = 1024
    queries: int = 32
    content: Literal["last", "copy"] | int = "last"
    kernel: int = 5
    recent: int = 8

    def __post_init__(self) -> None:
        require_budget("dapq", self.budget)
        if self.queries < 1 or self.kernel < 1 or self.kernel % 2 == 0 or self.recent < 0:
            raise SettingsError("dapq needs queries >= 1, an odd kernel >= 1 and recent >= 0")
        if isinstance(self.content, int) and self.content < 0:
            raise SettingsError(f"dapq: content must be last, copy or a token id, not {self.content}")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Probed(self, model.config, prompt)

    def settle(self, seq: Sequence) -> ForwardCoroutine[None]:
        prompt = seq.tokens[: seq.request.prompt_length]
        room = seq.request.model.config.max_positions - len(prompt)
        count = min(self.queries, room, max(len(prompt), 1))
        rows = {"last": prompt[-1:] * count, "copy": prompt[len(prompt) - count :]}
        tokens = [self.content] * count if isinstance(self.content, int) else rows[self.content]
        positions = np.arange(len(prompt), len(prompt) + count)
        yield from probed(seq, Segment(positions, np.asarray(tokens), cache=seq.cache, logit_rows=[]))


class Probed(Probing):
    """Drops the tokens that the pseudo queries attend to least."""

    def __init__(self, method: DapQ, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method = method

    def compress(self, cache: KVCache) -> None:
        count = entries(self.method.budget, self.prompt)
        for layer, paid in self.paid.items():
            scores = pooled(paid, self.method.kernel, "mean").double().cpu().numpy()
            scores[:, self.prompt - self.method.recent :] = np.inf
            if count < self.prompt:
                retain(cache, layer, best(scores, count))
